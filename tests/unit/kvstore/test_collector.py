"""The collector is paused for calls over many keys only, and always comes back."""

from __future__ import annotations

import gc

import pytest
import torch

from kvtrainer.kvstore.verbs import MANY, without_collections


class Verbs:
    """Notes whether the collector ran during the last call."""

    was_on = True

    @without_collections
    def verb(self, key: object, fails: bool = False) -> None:
        self.was_on = gc.isenabled()
        if fails:
            raise ValueError("no")


@pytest.mark.parametrize(("keys", "was_on"), [("a", True), (["a"] * (MANY - 1), True), (["a"] * MANY, False)])
def test_the_collector_is_paused_for_long_lists_of_keys_only(keys: object, was_on: bool) -> None:
    verbs = Verbs()
    verbs.verb(keys)
    assert (verbs.was_on, gc.isenabled()) == (was_on, True)


def test_keys_may_be_given_by_name() -> None:
    verbs = Verbs()
    verbs.verb(key=["a"] * MANY)
    assert not verbs.was_on


def test_the_collector_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="no"):
        Verbs().verb(["a"] * MANY, fails=True)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        Verbs().verb(["a"] * MANY)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_verbs_keep_their_results_over_many_keys() -> None:
    from kvtrainer import kvstore

    keys = [str(i) for i in range(2 * MANY)]
    values = [torch.full((3,), float(i)) for i in range(2 * MANY)]
    store = kvstore.create("local")
    store.init(keys, [torch.zeros(3) for _ in keys])  # type: ignore[attr-defined]
    outs = [torch.empty(3) for _ in keys]
    store.pushpull(keys, values, out=outs)
    assert all(torch.equal(out, value) for out, value in zip(outs, values, strict=True))
