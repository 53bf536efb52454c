"""Wrong arguments of a distributed store: refused at once, before a server is asked."""

from __future__ import annotations

from typing import Any

import pytest

from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import DistKVStore

NOBODY = {"rank": 0, "num_workers": 1, "servers": "127.0.0.1:1", "connect_timeout": 600.0}
"""An address at which nobody listens: a store that asked there would wait for ten minutes."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"servers": [1]}, "^1 is not the address of a server"),
        ({"servers": 5}, "servers .* is 5; it must be a list"),
        ({"num_workers": 10**30}, "num_workers is 1000.*; a server takes up to 65536 workers"),
        ({"num_workers": 1 << 40, "rank": 1 << 39}, "up to 65536 workers"),
        ({"rank": 10**30}, r"rank \(KVSTORE_RANK\) is 1000.* must lie in 0\.\.0"),
        ({"namespace": 5}, "namespace must be a str, got 5"),
        ({"namespace": ["job"]}, r"namespace must be a str, got \['job'\]"),
        ({"namespace": "job\ud800"}, r"namespace 'job\\ud800' has the surrogate '\\ud800' at position 3"),
        ({"timeout": "soon"}, "KVSTORE_TIMEOUT is 'soon'"),
    ],
)
def test_wrong_argument_is_named_without_asking_a_server(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DistKVStore(**{**NOBODY, **given})
