"""All of Gluon's optimizers whose update is elementwise: the names under which a store knows them."""

from __future__ import annotations

from kvstore_server.optimizer.base import Optimizer
from kvstore_server.optimizer.gluon_adam import FTML, AdaBelief, Adam, Adamax, AdamW, Nadam
from kvstore_server.optimizer.gluon_adaptive import AdaDelta, AdaGrad, Ftrl, RMSProp
from kvstore_server.optimizer.gluon_sgd import DCASGD, NAG, SGD, SGLD, Signum, Test

__all__ = [
    "DCASGD", "FAMILY", "FTML", "NAG", "SGD", "SGLD", "AdaBelief", "AdaDelta", "AdaGrad", "Adam", "AdamW", "Adamax",
    "Ftrl", "Nadam", "RMSProp", "Signum", "Test",
]  # fmt: skip

FAMILY: tuple[type[Optimizer], ...] = (
    SGD, NAG, SGLD, Signum, DCASGD, Test,
    Adam, AdamW, AdaBelief, Adamax, Nadam, FTML,
    AdaDelta, AdaGrad, RMSProp, Ftrl,
)  # fmt: skip
