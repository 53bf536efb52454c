"""Set up, build, save and resume a training run in the same way over every kvstore.

strategy = kvtrainer.strategy.Strategy(kvstore="device", work_dir="run")
model, trainer = strategy.prepare(net, optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)))
"""

from kvtrainer.kvstore.agreement import Agreement
from kvtrainer.kvstore.verbs import agreement_of
from kvtrainer.strategy.base import BaseStrategy
from kvtrainer.strategy.strategy import Strategy

__all__ = ["Agreement", "BaseStrategy", "Strategy", "agreement_of"]
