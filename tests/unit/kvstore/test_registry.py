"""Stores by their names: which there are, how one is added, and what creating one refuses."""

from __future__ import annotations

import logging
import uuid
from typing import Any, get_args

import pytest

from kvtrainer import kvstore
from kvtrainer.errors import ConfigurationError, UnknownNameError
from kvtrainer.kvstore import (
    DeviceKVStore,
    DeviceName,
    DistKVStore,
    DistName,
    KVStoreBase,
    LocalKVStore,
    LocalName,
)
from kvtrainer.kvstore.base import factory_of


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


def test_type_error_inside_a_store_is_not_taken_for_a_wrong_option() -> None:
    name = f"broken-{uuid.uuid4()}"

    @kvstore.register(name)
    def make(type: str) -> KVStoreBase:
        raise TypeError("a bug of its own")

    with pytest.raises(TypeError, match="a bug of its own"):
        kvstore.create(name)


def test_registering_a_name_in_use_replaces_it_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    name = f"twice-{uuid.uuid4()}"
    kvstore.register(name)(LocalKVStore)
    with caplog.at_level(logging.WARNING):
        kvstore.register(name.upper())(LocalKVStore)
    assert f"{name.upper()!r} is replaced" in caplog.text


@pytest.mark.parametrize("names", [(), (LocalKVStore,), ("",)])
def test_registering_without_a_name_is_refused(names: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="register takes the names of the store"):
        kvstore.register(*names)


class Plain(KVStoreBase):
    """A third-party store that takes no name, as MXNet's plug-ins."""

    type = "plain"
    rank = 0
    num_workers = 1
    capabilities = ("several_workers", "row_sparse_gradients")

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None: ...
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None: ...


def test_store_registered_as_in_mxnet_has_its_class_name(caplog: pytest.LogCaptureFixture) -> None:
    assert KVStoreBase.register(Plain) is Plain
    assert isinstance(kvstore.create("PLAIN"), Plain)
    with pytest.raises(ConfigurationError, match="'plain' does not take these options"):
        kvstore.create("plain", timeout=1.0)
    with caplog.at_level(logging.WARNING):
        KVStoreBase.register(Plain)
    assert "'Plain' is replaced" in caplog.text


@pytest.mark.parametrize("thing", ["plain", int, lambda type: LocalKVStore(type)])
def test_what_is_no_store_cannot_be_registered_as_mxnet_does_it(thing: Any) -> None:
    with pytest.raises(ConfigurationError, match="decorates a subclass of KVStoreBase"):
        KVStoreBase.register(thing)


def test_table_of_capabilities_has_a_row_for_every_store_and_says_what_the_class_says() -> None:
    name = f"made-{uuid.uuid4()}"
    kvstore.register(name)(Plain)
    kvstore.register(f"{name}-function")(lambda type: LocalKVStore(type))
    table = kvstore.capabilities()
    assert list(table) == sorted(table)
    assert all(tuple(row) == kvstore.CAPABILITIES for row in table.values())
    able = {store: {name for name, has in row.items() if has} for store, row in table.items()}
    assert able[name] == {"several_workers", "row_sparse_gradients"}
    assert able[f"{name}-function"] == set()
    assert able["device"] - able["local"] == {"gradient_compression", "several_workers"}
    assert able["nccl"] == {"optimizer", "several_workers"}
    assert "several_workers" not in able["local"]
    assert able["dist_sync"] >= {"optimizer", "gradient_compression", "several_workers"}
    assert able["dist_async"] - able["dist_sync"] == {"asynchronous"}


@pytest.mark.parametrize(
    ("names", "cls"), [(LocalName, LocalKVStore), (DeviceName, DeviceKVStore), (DistName, DistKVStore)]
)
def test_type_checkers_know_the_class_behind_every_built_in_name(names: Any, cls: type) -> None:
    built_in = {name for name in kvstore.capabilities() if factory_of(name) is cls and "-" not in name}
    assert set(get_args(names)) == built_in


def test_stores_know_their_capabilities_by_any_case_and_refuse_unknown_ones() -> None:
    for store, name, has in (
        (Plain(), "Several_Workers", True),
        (Plain(), KVStoreBase.OPTIMIZER, False),
        (kvstore.create("local"), "OPTIMIZER", True),
        (kvstore.create("local"), "gradient_compression", False),
        (kvstore.create("device"), "gradient_compression", True),
    ):
        assert store.is_capable(name) is has
        with pytest.raises(ConfigurationError, match="got 'flying'"):
            store.is_capable("flying")


@pytest.mark.parametrize("claimed", [("flying",), "optimizer"])
def test_class_that_claims_what_is_no_capability_is_refused_when_it_is_registered(claimed: Any) -> None:
    boastful = type("Boastful", (Plain,), {"capabilities": claimed})
    with pytest.raises(ConfigurationError, match="claims the capabilities"):
        kvstore.register(f"boastful-{uuid.uuid4()}")(boastful)
