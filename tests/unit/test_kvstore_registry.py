"""Stores by their names: which there are, how one is added, and what creating one refuses."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest

from kvtrainer import kvstore
from kvtrainer.errors import ConfigurationError, UnknownNameError
from kvtrainer.kvstore import KVStoreBase, LocalKVStore


@pytest.mark.parametrize(
    "name", ["local", "device", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device", "LOCAL"]
)
def test_store_has_the_type_it_was_created_under(name: str) -> None:
    store = kvstore.create(name)
    assert (store.type, store.rank, store.num_workers) == (name, 0, 1)


def test_unknown_store_lists_those_that_there_are() -> None:
    with pytest.raises(UnknownNameError, match=r"'bogus'; known ones: .*device.*dist_sync.*local"):
        kvstore.create("bogus")
    with pytest.raises(ConfigurationError, match="must be a string, got None"):
        kvstore.create(None)  # type: ignore[arg-type]


def test_option_that_a_store_does_not_take_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'local' does not take these options.*num_workers"):
        kvstore.create("local", num_workers=2)


def test_type_error_inside_a_store_is_not_taken_for_a_wrong_option() -> None:
    name = f"broken-{uuid.uuid4()}"

    @kvstore.register(name)
    def make(type: str) -> KVStoreBase:
        raise TypeError("a bug of its own")

    with pytest.raises(TypeError, match="a bug of its own"):
        kvstore.create(name)


def test_store_registered_under_a_name_in_use_replaces_it_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"twice-{uuid.uuid4()}"
    kvstore.register(name)(LocalKVStore)
    with caplog.at_level(logging.WARNING):
        kvstore.register(name.upper())(LocalKVStore)
    assert f"{name.upper()!r} is replaced" in caplog.text


@pytest.mark.parametrize("names", [(), (LocalKVStore,), ("",)])
def test_registering_without_a_name_is_refused(names: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="register takes the names of the store"):
        kvstore.register(*names)
