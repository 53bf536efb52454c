"""Half precision: how losses are scaled, who decides about overflows, and float32 copies of weights."""

from kvtrainer.precision.master_weights import copy_grads_to_fp32, copy_params_to_fp16

__all__ = ["copy_grads_to_fp32", "copy_params_to_fp16"]
