"""The optimizers of a training script: make one with `create`, or define your own.

A user-defined optimizer names its options in `defaults`, defines `update`, and is registered so that it can be asked
for by name. It sees flat, arbitrary pieces of the model; with `elementwise = False` it gets whole keys in their shape::

    @kvtrainer.optimizer.register
    class AveragedSign(kvtrainer.optimizer.Optimizer):
        defaults = {"learning_rate": 0.01, "momentum": 0.9}

        def create_state(self, weight):
            return {"momentum_buffer": torch.zeros_like(weight)}

        def update(self, weight, grad, state, hyper):
            grad.add_(weight, alpha=hyper["weight_decay"])
            state["momentum_buffer"].lerp_(grad, 1 - hyper["momentum"])
            weight.sub_(state["momentum_buffer"].sign(), alpha=hyper["lr"])

    trainer = kvtrainer.Trainer(model.parameters(), "averagedsign", {"learning_rate": 0.02})

On parameter servers the module that defines it is loaded with `kvstore-server --import MODULE`.
"""

from kvstore_server.optimizer import Optimizer, create, register

__all__ = ["Optimizer", "create", "register"]
