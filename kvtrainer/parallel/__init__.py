"""One model on several devices of one process."""

from kvtrainer.parallel.batch import PerReplica, ReplicaLosses
from kvtrainer.parallel.data_parallel import DataParallel, build_data_parallel_model

__all__ = ["DataParallel", "PerReplica", "ReplicaLosses", "build_data_parallel_model"]
