"""mmengine over a kvstore: importing this registers a strategy and an optimizer wrapper with mmengine.

    import kvtrainer.integrations.mmengine
    runner = FlexibleRunner(model, strategy=dict(type="KVStoreStrategy", kvstore="dist_sync"), ...)

In a configuration file: custom_imports = dict(imports=["kvtrainer.integrations.mmengine"]). Needs the extra
`kvtrainer[mmengine]`.
"""

try:
    import mmengine  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvtrainer.integrations.mmengine needs mmengine ({error}); install it with pip install 'kvtrainer[mmengine]'"
    ) from error

from kvtrainer.integrations.mmengine.strategy import KVStoreStrategy
from kvtrainer.integrations.mmengine.wrapper import TrainerOptimWrapper

__all__ = ["KVStoreStrategy", "TrainerOptimWrapper"]
