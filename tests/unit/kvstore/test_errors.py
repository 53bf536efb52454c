"""Wrong calls of the kvstore verbs: explained at once, where MXNet fails late or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvtrainer.errors import (
    ConfigurationError,
    KeyNotFoundError,
    KVStoreError,
    ShapeMismatchError,
    UnknownNameError,
)
from kvtrainer.kvstore import LocalKVStore
from tests.support.local_stores import full, local, pulled

STR_KEYS = ["b", "c", "d"]


Action = Callable[[LocalKVStore], object]
ERRORS: dict[str, tuple[Action, type[Exception], str]] = {
    "init twice": (lambda kv: kv.init("b", full(1)), ConfigurationError, "'b' is initialised already"),
    "key twice in one init": (lambda kv: kv.init(["x", "x"], [full(1)] * 2), ConfigurationError, "'x' is initialised"),
    "int key at init": (lambda kv: kv.init(3, full(1)), ConfigurationError, "has str keys, so 3"),
    "int key at push": (lambda kv: kv.push(3, full(1)), ConfigurationError, "has str keys, so 3"),
    "int key at pull": (lambda kv: kv.pull(3, out=full(1)), ConfigurationError, "has str keys, so 3"),
    "int key at pushpull": (lambda kv: kv.pushpull(3, full(1)), ConfigurationError, "has str keys, so 3"),
    "mixed keys": (lambda kv: kv.push(["b", 3], [full(1)] * 2), ConfigurationError, r"all be str.*'b', 3"),
    "float key": (lambda kv: kv.init(1.5, full(1)), ConfigurationError, "int or a str, got 1.5 of type float"),
    "bool key": (lambda kv: kv.init(True, full(1)), ConfigurationError, "int or a str, got True"),
    "unknown key at push": (lambda kv: kv.push("x", full(1)), KeyNotFoundError, "'x' has not been init"),
    "unknown key at pull": (lambda kv: kv.pull("x", out=full(1)), KeyNotFoundError, "'x' has not been initialised"),
    "shape at push": (
        lambda kv: kv.push("b", torch.ones(5, 5)), ShapeMismatchError, r"'b' holds float32\[4, 4\], got float32",
    ),
    "dtype at push": (lambda kv: kv.push("b", full(1).double()), ShapeMismatchError, r"got float64\[4, 4\]"),
    "shape of one replica": (lambda kv: kv.push("b", [full(1), torch.ones(3)]), ShapeMismatchError, r"float32\[3\]"),
    "shape of out": (lambda kv: kv.pull("b", out=torch.ones(16)), ShapeMismatchError, r"got float32\[16\]"),
    "shape of out in pushpull": (
        lambda kv: kv.pushpull("b", full(1), out=torch.ones(16)), ShapeMismatchError, r"got float32\[16\]",
    ),
    "shape of out in broadcast": (
        lambda kv: kv.broadcast("x", full(1), out=torch.ones(16)), ShapeMismatchError, r"'x' holds.*got float32\[16\]",
    ),
    "second key of a list": (
        lambda kv: kv.push(["b", "c"], [full(1), torch.ones(3)]), ShapeMismatchError, "'c' holds",
    ),
    "key that is no key": (lambda kv: kv.push(None, full(1)), ConfigurationError, "got None of type NoneType"),
    "tensor for several keys": (lambda kv: kv.push(["b", "c"], full(1)), ConfigurationError, "in value, got Tensor"),
    "no replicas": (lambda kv: kv.push("b", []), ConfigurationError, "must be a tensor or a list"),
    "number beside a replica": (lambda kv: kv.push("b", [full(1), 1]), ConfigurationError, "must be a tensor or"),
    "fewer values than keys": (lambda kv: kv.push(["b", "c"], [full(1)]), ConfigurationError, "need a list of 2"),
    "no out": (lambda kv: kv.pull("b"), ConfigurationError, "pull needs out="),
    "sparse value": (lambda kv: kv.push("b", full(1).to_sparse()), ConfigurationError, "'b' is sparse"),
    "value that is no tensor": (lambda kv: kv.push("b", 1.0), ConfigurationError, "must be a tensor or a list"),
    "meta value at init": (
        lambda kv: kv.init("x", torch.ones(2, device="meta")), ConfigurationError, "'x' is on the meta device",
    ),
    "meta value at push": (lambda kv: kv.push("b", full(1).to("meta")), ConfigurationError, "'b' is on the meta"),
    "meta replica": (
        lambda kv: kv.push("b", [full(1), full(1).to("meta")]), ConfigurationError, "'b' is on the meta device",
    ),
    "meta out": (lambda kv: kv.pull("b", out=full(1).to("meta")), ConfigurationError, "out of key 'b' is on the meta"),
    "expanded out": (
        lambda kv: kv.pull("b", out=torch.zeros(4, 1).expand(4, 4)),
        ShapeMismatchError,
        r"out of key 'b' has shape \[4, 4\] but strides \[1, 0\].*clone\(\)",
    ),
    "expanded out of pushpull": (
        lambda kv: kv.pushpull("b", torch.zeros(1).expand(4, 4)), ShapeMismatchError, r"'b' .* strides \[0, 0\]",
    ),
    "expanded out of broadcast": (
        lambda kv: kv.broadcast("x", full(1), torch.zeros(1).expand(4, 4)), ShapeMismatchError, "out of key 'x'",
    ),
    "surrogate in a key": (lambda kv: kv.init("w\ud800", full(1)), ConfigurationError, r"'w\\ud800' has the surrogate"),
    "surrogate in a key at push": (lambda kv: kv.push("\ud800", full(1)), ConfigurationError, "at position 0"),
    "key of too many bits": (lambda kv: kv.init(10**5000, full(1)), ConfigurationError, "up to 64 bits, got one of"),
    "key of 65 bits": (lambda kv: kv.init(2**63, full(1)), ConfigurationError, "got one of 64 bits"),
    "negative key of 65 bits": (lambda kv: kv.init(-(2**63) - 1, full(1)), ConfigurationError, "got one of 64 bits"),
    "dtype that cannot be stored": (
        lambda kv: kv.init("x", torch.ones(2, dtype=torch.bool)), ConfigurationError, "'x' has dtype bool",
    ),
    "no such optimizer": (lambda kv: kv.set_optimizer("sdg"), UnknownNameError, "'sdg'"),
    "no such capability": (lambda kv: kv.is_capable("foo"), ConfigurationError, "'optimizer', .*got 'foo'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_call_is_explained_at_once_and_changes_nothing(case: str) -> None:
    action, error, message = ERRORS[case]
    store = local(STR_KEYS, 3.0)
    with pytest.raises(error, match=message):
        action(store)
    assert all(pulled(store, key).equal(full(3)) for key in STR_KEYS)
    store.init("x", full(8))
    store.push("b", full(1))
    assert pulled(store, "b").equal(full(1))
    assert pulled(store, "x").equal(full(8))


def test_closed_store_says_so() -> None:
    with local(["w"]) as store:
        pass
    store.close()
    with pytest.raises(KVStoreError):
        store.push("w", full(1))
