"""`compat`: the numbers of MXNet 1.9.1, how one asks for them, and where it does something else on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtrainer
from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer import create_optimizer_from_spec, gluon, layerwise
from kvtrainer import Trainer
from kvtrainer.errors import StateMismatchError, TorchNameWarning
from tests.support.compat_table import ROWS, Row
from tests.support.optimizer_slices import Key

FAMILY = {cls.name: cls for cls in (*gluon.FAMILY, *layerwise.FAMILY)}
LACKING = {"adamw", "adabelief", "lans"}
"""Those that MXNet 1.9.1 has not."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.01, "momentum": 0.0, "lazy_update": True},
    "nag": {"lr": 0.01, "momentum": 0.0},
    "sgld": {"lr": 0.01},
    "signum": {"lr": 0.01, "momentum": 0.9, "wd_lh": 0.0},
    "ftml": {"lr": 0.01, "betas": (0.6, 0.999), "eps": 1e-8},
    "dcasgd": {"lr": 0.01, "momentum": 0.0, "lamda": 0.04},
    "adam": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "lazy_update": True},
    "adamax": {"lr": 0.002, "betas": (0.9, 0.999), "eps": 0.0},
    "nadam": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "schedule_decay": 0.004},
    "adadelta": {"lr": 0.01, "rho": 0.9, "eps": 1e-5},
    "adagrad": {"lr": 0.01, "eps": 1e-7},
    "rmsprop": {
        "lr": 0.001,
        "rho": 0.9,
        "momentum": 0.9,
        "eps": 1e-8,
        "centered": False,
        "clip_weights": None,
    },
    "ftrl": {"lr": 0.1, "lamda1": 0.01, "beta": 1.0},
    "lamb": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "bias_correction": True},
    "lars": {
        "lr": 0.01,
        "momentum": 0.0,
        "eta": 0.001,
        "eps": 0.0,
        "lazy_update": True,
        "momentum_correction": True,
    },
    "groupadagrad": {"lr": 0.01, "eps": 1e-5},
    "test": {"lr": 0.01},
}
"""What the constructors of MXNet 1.9.1 have; Adamax has no epsilon."""


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_COMPAT", raising=False)


def end(name: str, options: Mapping[str, Any], gradient: float, updates: int = 2) -> float:
    """Where a weight of 1 ends after equal gradients."""
    key = Key(kvtrainer.optimizer.create(name, **options), torch.ones(1, 1))
    for _ in range(updates):
        key.update(torch.full((1, 1), gradient))
    return key.weight.item()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_page_has_the_numbers_of_both_releases(row: Row) -> None:
    for release, expected in (("mxnet1", row.of_1), ("mxnet2", row.of_2)):
        found = end(row.name, {**row.options, "compat": release}, row.gradient)
        assert found == pytest.approx(expected, abs=1e-5), release


def test_every_optimizer_has_the_defaults_of_mxnet_1() -> None:
    assert DEFAULTS.keys() == FAMILY.keys() - LACKING
    for name, defaults in DEFAULTS.items():
        optimizer = kvtrainer.optimizer.create(name, compat="mxnet1")
        assert defaults.items() <= optimizer.hyper.items(), name
        assert (optimizer.wd, optimizer.clip_gradient) == (0.0, None)


def test_the_argument_comes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def rates() -> list[float]:
        make = kvtrainer.optimizer.create
        return [make("sgd").lr, make("sgd", compat="mxnet1").lr, make("sgd", compat="mxnet2").lr]

    assert rates() == [0.1, 0.01, 0.1]
    monkeypatch.setenv("KVSTORE_COMPAT", "mxnet1")
    assert rates() == [0.01, 0.01, 0.1]
    assert kvtrainer.optimizer.SGD().lr == 0.01
    monkeypatch.setenv("KVSTORE_COMPAT", "mxnet2")
    assert rates() == [0.1, 0.01, 0.1]


def test_a_trainer_takes_the_option_and_a_store_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    trainer = Trainer([weight], "nag", {"compat": "mxnet1", "learning_rate": 0.1, "momentum": 0.9, "wd": 0.1})
    for _ in range(2):
        weight.grad = torch.ones(1)
        trainer.step(1)
    assert weight.item() == pytest.approx(0.498564, abs=1e-6)
    monkeypatch.setenv("KVSTORE_COMPAT", "mxnet1")
    kv = kvtrainer.kv.create("local")
    kv.init("w", torch.ones(1))
    kv.set_optimizer("test")
    kv.push("w", torch.ones(1))
    kv.pull("w", out=(pulled := torch.empty(1)))
    assert pulled.item() == 2.0


@pytest.mark.parametrize("wrong", ["mxnet", "mxnet3", "1.9.1", 1, True])
def test_another_word_is_refused_with_those_that_are_right(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'mxnet1' or 'mxnet2'"):
        kvtrainer.optimizer.create("sgd", compat=wrong)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_COMPAT", "mxnte1")
    with pytest.raises(ConfigurationError, match=r"KVSTORE_COMPAT must be .*Did you mean 'mxnet1'"):
        Trainer([torch.nn.Parameter(torch.ones(1))], "sgd")


@pytest.mark.parametrize("name", sorted(LACKING))
def test_what_mxnet_1_lacks_is_refused_when_asked_for_and_else_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=f"MXNet 1.9.1 has no optimizer '{name}'"):
        kvtrainer.optimizer.create(name, compat="mxnet1")
    plain = kvtrainer.optimizer.create(name).spec()
    monkeypatch.setenv("KVSTORE_COMPAT", "mxnet1")
    assert kvtrainer.optimizer.create(name).spec() == plain


@pytest.mark.parametrize("optimizer", ["torch:SGD", torch.optim.Adam])
def test_torchs_classes_have_no_release_of_mxnet(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="has torch's"):
        kvtrainer.optimizer.create(optimizer, lr=0.1, compat="mxnet1")
    monkeypatch.setenv("KVSTORE_COMPAT", "mxnet1")
    assert kvtrainer.optimizer.create(optimizer, lr=0.1).registered_name.startswith("torch:")


def test_a_users_optimizer_has_no_release_but_one_derived_from_ours_has() -> None:
    class Own(kvtrainer.optimizer.Optimizer):
        pass

    class Derived(kvtrainer.optimizer.SGD):
        pass

    with pytest.raises(ConfigurationError, match="has no optimizer 'own'"):
        Own(compat="mxnet1")
    assert Derived(compat="mxnet1").lr == 0.01


@pytest.mark.parametrize("variable", ["", "mxnet1", "mxnet2"])
def test_a_description_is_independent_of_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [kvtrainer.optimizer.create("rmsprop", compat=release) for release in ("mxnet1", "mxnet2")]
    monkeypatch.setenv("KVSTORE_COMPAT", variable)
    for optimizer, name in zip(made, ("mxnet1:rmsprop", "rmsprop"), strict=True):
        arrived = create_optimizer_from_spec(optimizer.spec())
        assert arrived.spec() == optimizer.spec()
        assert (arrived.registered_name, arrived.is_mxnet1) == (name, optimizer.is_mxnet1)


@pytest.mark.parametrize("name", ["mxnet1:adamw", "mxnet1:torch:SGD", "mxnet1:mxnet1:sgd"])
def test_a_description_of_what_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        create_optimizer_from_spec({"name": name, "hyper": {"lr": 0.1}})


def test_the_name_with_its_prefix_means_the_same_as_the_option() -> None:
    optimizer = kvtrainer.optimizer.create("mxnet1:NAG")
    assert optimizer.spec() == kvtrainer.optimizer.create("nag", compat="mxnet1").spec()
    assert optimizer.spec() == kvtrainer.optimizer.create("mxnet1:nag", compat="mxnet1").spec()
    with pytest.raises(ConfigurationError, match="contradicts"):
        kvtrainer.optimizer.create("mxnet1:nag", compat="mxnet2")


def test_rmsprop_has_the_words_of_mxnet_1() -> None:
    optimizer = kvtrainer.optimizer.create("rmsprop", compat="mxnet1", gamma1=0.5, gamma2=0.25)
    assert (optimizer.hyper["rho"], optimizer.hyper["momentum"]) == (0.5, 0.25)
    with pytest.raises(ConfigurationError, match="two spellings"):
        kvtrainer.optimizer.create("rmsprop", compat="mxnet1", gamma1=0.5, rho=0.5)
    with pytest.raises(ConfigurationError, match="no option 'gamma1'"):
        kvtrainer.optimizer.create("rmsprop", gamma1=0.5)


def test_a_named_release_gives_no_warning_about_torchs_names(recwarn: pytest.WarningsRecorder) -> None:
    kvtrainer.optimizer.create("SGD", compat="mxnet1")
    kvtrainer.optimizer.create("SGD", compat="mxnet2")
    assert not recwarn.list
    with pytest.warns(TorchNameWarning):
        kvtrainer.optimizer.create("SGD")


@pytest.mark.parametrize("beta2", [0.999, 0.0])
def test_adamax_without_an_epsilon_leaves_weights_alone_that_have_no_gradient(beta2: float) -> None:
    optimizer = kvtrainer.optimizer.create("adamax", compat="mxnet1", lr=0.5, beta2=beta2)
    key = Key(optimizer, torch.ones(1, 2))
    for _ in range(3):
        key.update(torch.tensor([[0.0, 1.0]]))
    assert key.weight.tolist() == [[1.0, pytest.approx(-0.5)]]


def test_dcasgd_has_a_momentum_that_mxnet_1_fails_with() -> None:
    # d = 1 + 0.5 (w - w'), m = -d, then -(0.5 + 1 + 0.5 (-1)): the formula that 1.9.1 documents.
    assert end("mxnet1:dcasgd", {"lr": 1.0, "momentum": 0.5, "lamda": 0.5}, 1.0) == 1.0 - 1.0 - (0.5 + 0.5)


def test_lars_corrects_the_momentum_of_every_key_by_its_rate() -> None:
    optimizer = kvtrainer.optimizer.create("lars", compat="mxnet1", momentum=0.5, eta=1.0)
    key = Key(optimizer, torch.full((1, 1), 8.0), "bias")
    key.update(torch.ones(1, 1), lr=0.5)  # as long as the weight is: -4
    assert key.weight.item() == 4.0
    key.update(torch.ones(1, 1), lr=0.25)  # 4 / 2 of it, of which a half, and a quarter of 4
    assert key.weight.item() == 4.0 - (0.5 * 2.0 + 1.0)


def test_rows_alone_are_updated_by_default_as_in_mxnet_1() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    trainer = Trainer([weight], "sgd", {"compat": "mxnet1", "learning_rate": 0.5, "wd": 0.5})
    weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (3, 2))
    trainer.step(1)
    assert weight.tolist() == [[1.0, 1.0], [0.25, 0.25], [1.0, 1.0]]


def test_rows_of_adagrad_with_decay_count_as_a_dense_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 1))
    options = {"compat": "mxnet1", "learning_rate": 0.5, "wd": 0.5, "eps": 0.25}
    trainer = Trainer([weight], "adagrad", options)
    weight.grad = torch.sparse_coo_tensor([[1]], torch.full((1, 1), 2.0), (3, 1))
    trainer.step(1)
    moved = 0.5 * (2.0 / 4.25**0.5 + 0.5)
    assert weight.tolist() == [[0.75], [pytest.approx(1.0 - moved)], [0.75]]


def test_a_store_that_is_told_names_decays_weights_and_gammas_alone() -> None:
    names = {0: "fc_weight", 1: "fc_bias", "2": "bn_gamma", 3: "bn_beta"}
    keys = ["0", "1", "2", "3", "4"]
    ends = {}
    for name in ("sgd", "lars"):
        optimizer = kvtrainer.optimizer.create(
            name, compat="mxnet1", learning_rate=1.0, wd=0.5, param_idx2name=names
        )
        kv = kvtrainer.kv.create("local")
        kv.init(keys, [torch.ones(1) for _ in keys])
        kv.set_optimizer(optimizer)
        kv.push(keys, [torch.zeros(1) for _ in keys])
        pulled = [torch.empty(1) for _ in keys]
        kv.pull(keys, out=pulled)
        ends[name] = [value.item() for value in pulled]
    assert ends == {"sgd": [0.5, 1.0, 0.5, 1.0, 0.5], "lars": [0.5, 1.0, 1.0, 1.0, 0.5]}
    assert create_optimizer_from_spec(optimizer.spec()).param_idx2name == {
        str(key): name for key, name in names.items()
    }


@pytest.mark.parametrize("wrong", [["fc_weight"], {0: 1}, {1.5: "fc_weight"}])
def test_names_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="param_idx2name must be"):
        kvtrainer.optimizer.create("sgd", compat="mxnet1", param_idx2name=wrong)


def test_a_trainer_refuses_names_that_would_do_nothing_there() -> None:
    with pytest.raises(ConfigurationError, match="wd_mult"):
        Trainer(
            [torch.nn.Parameter(torch.ones(1))], "sgd", {"compat": "mxnet1", "param_idx2name": {0: "fc_bias"}}
        )


def test_a_file_of_the_other_release_is_refused(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1))

    def trainer(compat: str) -> Trainer:
        made = Trainer([weight], "adagrad", {"compat": compat})
        weight.grad = torch.ones(1)
        made.step(1)
        return made

    trainer("mxnet1").save_states(tmp_path / "states")
    trainer("mxnet1").load_states(tmp_path / "states")
    with pytest.raises(StateMismatchError, match=r"'mxnet1:adagrad' in the file and 'adagrad' here"):
        trainer("mxnet2").load_states(tmp_path / "states")


def test_the_first_argument_of_a_class_is_its_learning_rate() -> None:
    for name in DEFAULTS:
        made = getattr(kvtrainer.optimizer, FAMILY[name].__name__)(0.25, compat="mxnet1")
        assert made.lr == 0.25


def test_mxnets_names_of_classes_and_of_the_store_are_there() -> None:
    for name, cls in FAMILY.items():
        assert getattr(kvtrainer.optimizer, cls.__name__) is cls
        assert type(kvtrainer.optimizer.create(name)) is cls
    assert {cls.__name__ for cls in FAMILY.values()} < set(kvtrainer.optimizer.__all__)
    assert kvtrainer.kv is kvtrainer.kvstore
    weight = torch.nn.Parameter(torch.ones(1))
    trainer = Trainer([weight], kvtrainer.optimizer.SGD(learning_rate=0.5))
    weight.grad = torch.ones(1)
    trainer.step(1)
    assert weight.item() == 0.5
