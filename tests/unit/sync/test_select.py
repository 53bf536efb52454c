"""Which store a Trainer uses and where its optimizer runs: MXNet's table, row by row, and what contradicts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvstore_server.codec import make_codec
from kvtrainer import Trainer, kvstore
from kvtrainer.errors import ConfigurationError
from kvtrainer.sync.select import LARGE, select_store


class Plugin(kvstore.KVStoreBase):
    """A third-party store."""

    type = "choice-plugin"
    rank = 0
    num_workers = 1

    def __init__(self, type: str = "choice-plugin") -> None:
        pass

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None: ...
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None: ...


kvstore.register("choice-plugin")(Plugin)

GIVEN: dict[str, Any] = {
    "no kvstore": lambda: None,
    "one device": lambda: "device",
    "local object": lambda: kvstore.create("local"),
    "device object": lambda: kvstore.create("device"),
    "dist_sync": lambda: "dist_sync",
    "dist": lambda: "DIST",
    "plugin by name": lambda: "choice-plugin",
    "plugin object": Plugin,
}
TABLE: list[tuple[str, bool | None, bool, bool]] = [
    # given, update_on_kvstore → is there a store, does it update
    ("no kvstore", None, False, False),
    ("no kvstore", False, False, False),
    ("one device", None, False, False),
    ("one device", False, False, False),
    ("one device", True, True, True),
    ("local object", None, True, True),
    ("local object", False, True, False),
    ("local object", True, True, True),
    ("device object", None, True, True),
    ("device object", False, True, False),
    ("device object", True, True, True),
    ("dist_sync", None, True, True),
    ("dist_sync", False, True, False),
    ("dist_sync", True, True, True),
    ("dist", None, True, True),
    ("plugin by name", None, True, False),
    ("plugin by name", False, True, False),
    ("plugin object", None, True, False),
    ("plugin object", False, True, False),
]


@pytest.mark.parametrize(("given", "asked", "store", "updates"), TABLE)
def test_store_and_site_of_the_update_follow_the_table(
    given: str, asked: bool | None, store: bool, updates: bool
) -> None:
    selection = select_store(GIVEN[given](), asked)
    assert (selection.kvstore is not None, selection.updates_weights) == (store, updates)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no kvstore", "needs a kvstore, but kvstore=None"),
        ("plugin by name", r"'choice-plugin' cannot run .*update_on_kvstore=False"),
        ("plugin object", r"'choice-plugin' cannot run .*update_on_kvstore=False"),
    ],
)
def test_update_in_a_store_that_cannot_is_a_value_error(given: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        select_store(GIVEN[given](), True)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("type", ["dist_async", "dist_ssp", "dist_device_async"])
def test_without_synchronous_rounds_the_update_is_in_the_store_whatever_the_environment_says(
    type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    assert select_store(type).updates_weights
    with pytest.raises(ConfigurationError, match="update_on_kvstore=True when training in async mode"):
        select_store(type, False)


WAYS = {"overlap": "overlaps", "hierarchy": "is_hierarchical"}
"""Options about the ways of gradients and weights, and where a selection says so."""
way = pytest.mark.parametrize("option", WAYS)


@way
@pytest.mark.parametrize("given", ["dist_sync", "dist"])
def test_gradients_and_weights_go_another_way_only_where_that_is_asked_for(given: str, option: str) -> None:
    for asked in WAYS:
        selection = select_store(GIVEN[given](), True, **{asked: True})  # type: ignore[arg-type]
        assert getattr(selection, WAYS[option]) is (asked == option)


def test_gradients_go_during_the_backward_pass_whoever_updates() -> None:
    assert all(select_store("dist_sync", asked, overlap=True).overlaps for asked in (None, False))


@way
@pytest.mark.parametrize(
    "given", ["no kvstore", "one device", "local object", "device object", "plugin object"]
)
def test_another_way_needs_servers(given: str, option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}=True needs servers"):
        select_store(GIVEN[given](), **{option: True})


@way
@pytest.mark.parametrize("type", ["dist_async", "dist_ssp"])
def test_another_way_needs_synchronous_rounds(type: str, option: str) -> None:
    with pytest.raises(ConfigurationError, match="synchronous rounds"):
        select_store(type, **{option: True})


@pytest.mark.parametrize("devices", [("cuda:0",), ("cpu", "cpu")])
def test_overlap_needs_one_cpu_device(devices: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="on one CPU device"):
        select_store("dist_sync", devices=[torch.device(name) for name in devices], overlap=True)


@way
@pytest.mark.parametrize("given", [1, "yes", None])
def test_another_way_is_true_or_false(given: Any, option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} must be True or False"):
        select_store("dist_sync", **{option: given})


def test_sums_of_hosts_and_overlap_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="hierarchy=True or overlap=True"):
        select_store("dist_sync", hierarchy=True, overlap=True)


def test_environment_that_is_neither_0_nor_1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "maybe")
    with pytest.raises(ConfigurationError, match="MXNET_UPDATE_ON_KVSTORE must be 0 or 1, got 'maybe'"):
        select_store("dist_sync")


def test_size_of_the_largest_parameter_reaches_the_choice() -> None:
    parameters = [
        Parameter(torch.empty(3)),
        Parameter(torch.empty(LARGE + 1, device="cpu", dtype=torch.float16)),
    ]
    small, large = (
        Trainer(some, "test", kvstore=kvstore.create("local")) for some in (parameters[:1], parameters[1:])
    )
    large.allreduce_grads()
    with pytest.raises(
        ConfigurationError, match=r"allreduce_grads\(\) is not possible while the optimizer runs in"
    ):
        small.allreduce_grads()


def test_aggregation_keeps_the_update_out_of_the_store() -> None:
    assert select_store("dist_sync", None, aggregate_num=4).updates_weights is False
    assert select_store("dist_sync", False, aggregate_num=4).updates_weights is False
    assert select_store(None, None, aggregate_num=4).updates_weights is False
    for type in ("dist_sync", "dist_async", "dist_ssp"):
        with pytest.raises(ConfigurationError, match=r"aggregate_num is above 1, got 4"):
            select_store(type, True, aggregate_num=4)
    for asked in (None, False):
        with pytest.raises(ConfigurationError, match="async mode"):
            select_store("dist_async", asked, aggregate_num=4)


def test_aggregate_num_of_the_optimizer_reaches_the_choice() -> None:
    p = [Parameter(torch.zeros(1))]
    with pytest.raises(ValueError, match="aggregate_num is above 1, got 2"):
        Trainer(p, "sgd", {"aggregate_num": 2}, kvstore="local", update_on_kvstore=True)
    for name in ("adamw", "lamb"):
        Trainer(p, name, kvstore=kvstore.create("local"), update_on_kvstore=True)


@pytest.mark.parametrize("name", ["dist_sync", "choice-plugin", "device"])
def test_no_store_is_opened_before_the_first_step(name: str) -> None:
    uok = True if name == "device" else None
    trainer = Trainer([Parameter(torch.zeros(1))], "sgd", kvstore=name, update_on_kvstore=uok)
    assert trainer.kvstore is None


@pytest.mark.parametrize("given", ["dist_sync", "device object"])
def test_compression_is_accepted_where_gradients_travel(given: str) -> None:
    selection = select_store(GIVEN[given](), None, {"type": "2bit", "threshold": 0.25})
    assert selection.codec is not None
    assert selection.codec.spec() == {"type": "2bit", "threshold": 0.25}


@pytest.mark.parametrize("params", [None, {"type": "none"}])
def test_no_compression_is_no_codec_with_any_store(params: Any) -> None:
    for make in GIVEN.values():
        assert select_store(make(), None, params).codec is None


@pytest.mark.parametrize("given", ["local object", "plugin by name", "plugin object"])
def test_compression_is_refused_where_the_store_has_none(given: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"not supported for this type of kvstore: .*; use .device. or .dist_sync."
    ):
        select_store(GIVEN[given](), None, {"type": "2bit"})


@pytest.mark.parametrize(
    "params", [{"type": "3bit"}, {"threshold": 1}, "2bit", {"type": "2bit", "threshold": -1}]
)
def test_wrong_compression_params_are_refused_even_without_a_store(params: Any) -> None:
    for given in (None, "device", "dist_sync"):
        with pytest.raises(ConfigurationError, match=r"compression|threshold"):
            select_store(given, None, params)


@pytest.mark.parametrize("given", [None, "device"])
def test_compression_without_a_store_has_no_effect_and_says_so_once(
    given: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    p = Parameter(torch.zeros(1))
    trainer = Trainer(
        [p], "sgd", {"lr": 1.0}, kvstore=given, compression_params={"type": "2bit", "threshold": 0.5}
    )
    for _ in range(2):
        (p * 3).sum().backward()
        trainer.step(1)
    assert p.item() == -6
    assert [record.message.startswith("compression_params") for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "params", [{"pull": "bf16"}, {"type": "none", "pull": "BF16"}, {"type": "2bit", "pull": "bf16"}]
)
def test_weights_may_come_back_rounded_whether_gradients_are_compressed_or_not(
    params: dict[str, Any],
) -> None:
    selection = select_store("dist_sync", None, params)
    assert selection.pull_codec == make_codec({"type": "bf16"})
    assert (selection.codec is not None) == (params.get("type") == "2bit")


@pytest.mark.parametrize(
    ("given", "site"),
    [("no kvstore", None), ("one device", None), ("one device", True), ("local object", None), ("plugin by name", None),
     ("dist_sync", False)],
)  # fmt: skip
def test_weights_cannot_come_back_rounded_where_no_server_keeps_them(given: str, site: bool | None) -> None:
    with pytest.raises(ConfigurationError, match="'pull' in compression_params"):
        select_store(GIVEN[given](), site, {"pull": "bf16"})


def test_the_optimizer_that_aggregates_is_told_too_that_no_weights_come_back() -> None:
    with pytest.raises(ConfigurationError, match="'pull' in compression_params"):
        select_store("dist_sync", None, {"pull": "bf16"}, aggregate_num=4)


@pytest.mark.parametrize(
    "given", ["topk", "INT8", {"type": "topk", "ratio": 0.1}, {"type": "2bit", "threshold": 0.001}]
)
def test_changes_of_weights_may_come_back_by_any_codec_that_can_say_zero(given: Any) -> None:
    wanted = make_codec(given if isinstance(given, dict) else {"type": given})
    assert select_store("dist_sync", None, {"pull": given}).pull_codec == wanted


@pytest.mark.parametrize("given", ["none", {"type": "none"}])
def test_weights_may_be_said_to_come_back_as_they_are(given: Any) -> None:
    assert select_store("dist_sync", None, {"pull": given}).pull_codec is None


@pytest.mark.parametrize(
    "given", ["4bit", 16, None, {}, {"type": "topk", "ratio": 2.0}, "1bit", {"type": "1bit"}]
)
def test_what_weights_cannot_come_back_by_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError):
        select_store("dist_sync", None, {"type": "2bit", "pull": given})
