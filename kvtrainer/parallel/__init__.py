"""One model on several devices of one process."""

from kvtrainer.parallel.data_parallel import DataParallel, build_data_parallel_model
from kvtrainer.parallel.losses import ReplicaLosses
from kvtrainer.parallel.scatter import PerReplica

__all__ = ["DataParallel", "PerReplica", "ReplicaLosses", "build_data_parallel_model"]
