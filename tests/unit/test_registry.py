"""Names in configurations: how classes are registered, found, built and imported, and what a typo is answered with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from kvstore_server.errors import did_you_mean
from kvstore_server.optimizer import create, create_optimizer_from_spec, lr_scheduler
from kvstore_server.optimizer import registry as of_stores
from kvtrainer import DataParallel, Trainer, hooks, kvstore, optimizer, registry
from kvtrainer.config import import_modules
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    CustomImportError,
    FailedImportWarning,
    KVStoreError,
    RegistryError,
    UnknownNameError,
    UnregisteredNameError,
)
from kvtrainer.registry import OPTIMIZERS, Registry
from kvtrainer.schedules import ParamSchedule, detectron_schedule
from tests.support.processes import ROOT
from tests.support.strategies import Make, Net, make


class Box:
    def __init__(self, **options: Any) -> None:
        self.options = options


@pytest.fixture
def boxes() -> Registry:
    return Registry("box", "kvtrainer_tests.boxes")


@pytest.fixture
def _own_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))
    monkeypatch.setattr(of_stores, "_registry", dict(of_stores._registry))
    monkeypatch.setattr(of_stores, "_declared", set(of_stores._declared))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which modules can be imported, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_unknown_name_is_a_key_error_that_names_the_registry_and_what_is_similar(boxes: Registry) -> None:
    boxes.register()(Box)
    with pytest.raises(KeyError, match=r"'Bx' is not in the box registry.* 'Box'") as caught:
        boxes.build({"type": "Bx"})
    assert isinstance(caught.value, UnregisteredNameError)
    assert isinstance(caught.value, UnknownNameError)
    assert "custom_imports" in str(caught.value)


def test_name_that_is_taken_is_refused_unless_forced(boxes: Registry) -> None:
    boxes.register()(Box)
    boxes.register()(Box)
    with pytest.raises(RegistryError, match=r"box 'Box' .*\.Box"):
        boxes.register("Box")(dict)
    with pytest.raises(RegistryError):
        boxes.register(["Free", "Box"])(dict)
    assert "Free" not in boxes
    boxes.register("Box", force=True)(dict)
    assert boxes.get("Box") is dict


def test_name_of_an_optimizer_of_torch_is_taken_too() -> None:
    with pytest.raises(RegistryError, match=r"'SGD' .*torch\.optim"):
        OPTIMIZERS.register()(type("SGD", (torch.optim.SGD,), {}))
    OPTIMIZERS.register()(torch.optim.SGD)
    assert OPTIMIZERS.get("SGD") is torch.optim.SGD


def test_name_is_found_in_another_case_where_there_is_none_in_this(boxes: Registry) -> None:
    boxes.register("BOX")(dict)
    boxes.register("Box")(Box)
    assert boxes.get("Box") is Box
    assert boxes.get("BOX") is dict
    assert boxes.get("box") is dict


def plugin(folder: Path, name: str, text: str, *points: str) -> None:
    """An installed package whose entry points add to the registry of boxes."""
    (folder / f"{name}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = ["[kvtrainer_tests.boxes]", *points]
    (info / "entry_points.txt").write_text("\n".join(lines))


def test_entry_point_is_loaded_when_its_name_is_first_missed(boxes: Registry, modules: Path) -> None:
    plugin(modules, "plugged_box", "class Plugged: pass", "Plugged = plugged_box:Plugged")
    assert "Plugged" in boxes
    assert "plugged_box" not in sys.modules
    assert boxes.get("Plugged").__module__ == "plugged_box"


def test_entry_point_may_be_a_module_that_registers_names_of_its_own(
    boxes: Registry, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BOXES", boxes, raising=False)
    text = "from kvtrainer import registry\n@registry.BOXES.register()\nclass Hidden: pass"
    plugin(modules, "module_of_boxes", text, "anything = module_of_boxes")
    assert boxes.get("Hidden").__module__ == "module_of_boxes"


def test_broken_plugin_is_named_and_disturbs_no_other(boxes: Registry, modules: Path) -> None:
    plugin(modules, "broken_box", "raise RuntimeError('no disk')", "Broken = broken_box:Broken")
    plugin(modules, "good_box", "class Good: pass", "Good = good_box:Good")
    assert boxes.get("Good").__name__ == "Good"
    with pytest.raises(UnregisteredNameError, match="Broken: RuntimeError: no disk"):
        boxes.get("Broken")


def test_names_of_optimizers_are_torchs_before_gluons() -> None:
    assert OPTIMIZERS.get("sgd") is OPTIMIZERS.get("SGD") is OPTIMIZERS.get("torch:SGD") is torch.optim.SGD
    assert OPTIMIZERS.get("gluon:sgd") is type(create("sgd"))
    assert OPTIMIZERS.get("Signum") is OPTIMIZERS.get("gluon:signum") is type(create("signum"))
    with pytest.raises(KeyError, match="Did you mean 'Adam"):
        OPTIMIZERS.get("Adamm")


def test_every_hook_of_the_library_is_found_by_name() -> None:
    names = [name for name in vars(hooks) if name.endswith(("OptimizerHook", "UpdaterHook"))]
    assert len(names) == 22
    for name in names:
        assert registry.HOOKS.get(name) is getattr(hooks, name)


def test_built_in_names_are_found_though_a_script_imports_only_the_registries() -> None:
    assert registry.OPTIMIZER_BUILDERS is registry.OPTIMIZER_CONSTRUCTORS
    script = (
        "from kvtrainer.registry import HOOKS, OPTIMIZER_CONSTRUCTORS, OPTIMIZERS\n"
        "print('OptimizerHook' in HOOKS, 'DefaultOptimizerConstructor' in OPTIMIZER_CONSTRUCTORS, 'sgd' in OPTIMIZERS)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.split() == ["True"] * 3


@pytest.mark.parametrize("names", [(), ("Crate",), ("Crate", "Chest")])
def test_class_is_registered_by_every_call_form_and_built_from_a_dict(names: tuple[str, ...]) -> None:
    own = names or ("Box",)
    given = {"name": list(names) if len(names) > 1 else names[0]} if names else {}
    for add in (
        lambda one: one.register(*given.values())(Box),
        lambda one: one.register_module(**given)(Box),
        lambda one: one.register_module(module=Box, **given),
    ):
        boxes = Registry("box")
        assert add(boxes) is Box
        assert [name in boxes for name in ("Box", *own)] == [not names, *(True for _ in own)]
        for kind in (*own, Box):
            cfg = {"type": kind, "a": 1}
            assert boxes.build(cfg, a=0, b=2).options == {"a": 1, "b": 2}
            assert cfg == {"type": kind, "a": 1}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda boxes: boxes.build("Box"), TypeError, "str"),
        (lambda boxes: boxes.build({"a": 1}), KeyError, "'type'"),
        (lambda boxes: boxes.build({"type": 3}), TypeError, "3"),
        (lambda boxes: boxes.register(Box), TypeError, "write @"),
        (lambda boxes: boxes.register("three")(3), TypeError, "3"),
    ],
)
def test_impossible_entries_are_refused(
    boxes: Registry, call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call(boxes)
    assert isinstance(caught.value, ConfigurationError)


MMENGINES = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SparseAdam", "TorchAdafactor",
)  # fmt: skip
"""What mmengine 0.10.7 registers of torch 2.13's optimizers where transformers is not installed."""


@pytest.mark.parametrize("name", MMENGINES)
def test_a_name_that_mmengine_gives_to_an_optimizer_of_torch_means_that_one(name: str) -> None:
    if hasattr(torch.optim, own := name.removeprefix("Torch")):
        assert OPTIMIZERS.get(name) is getattr(torch.optim, own)


def test_every_torch_optimizer_is_built_by_its_name() -> None:
    kinds = [one for one in vars(torch.optim).values() if isinstance(one, type)]
    assert len(kinds) > 13
    for kind in kinds:
        assert kind is torch.optim.Optimizer or OPTIMIZERS.get(kind.__name__) is kind
    built = OPTIMIZERS.build({"type": "Adam", "lr": 0.1}, params=[Parameter(torch.ones(2))])
    assert type(built) is torch.optim.Adam


@pytest.mark.usefixtures("_own_optimizers")
@pytest.mark.parametrize("is_elementwise", [False, True])
def test_registered_torch_class_gets_whole_keys_unless_declared(is_elementwise: bool) -> None:
    class Mine(torch.optim.SGD):
        pass

    if is_elementwise:
        of_stores.register(Mine)
    OPTIMIZERS.register_module()(Mine)
    assert OPTIMIZERS.get("Mine") is Mine
    there = create_optimizer_from_spec(create(Mine, lr=0.5).spec())
    assert (there.registered_name, there.elementwise) == ("torch:Mine", is_elementwise)


def test_custom_imports_import_modules_by_name(modules: Path) -> None:
    (modules / "imported_by_name.py").write_text("loaded = True")
    import_modules(["imported_by_name"])
    import_modules("imported_by_name")
    assert sys.modules["imported_by_name"].loaded
    with pytest.raises(CustomImportError, match="'no_such_module' of custom_imports"):
        import_modules(["no_such_module"])
    with pytest.warns(FailedImportWarning, match="'no_such_module'"):
        import_modules(["no_such_module"], allow_failed_imports=True)
    with pytest.raises(ArgumentTypeError, match="3"):
        import_modules([3])  # type: ignore[list-item]


__all__ = ["make"]


def trainer(**options: Any) -> Trainer:
    return Trainer(nn.Linear(2, 1), "sgd", **options)


def from_config(cfg: Mapping[str, Any]) -> Trainer:
    return Trainer.from_config(nn.Linear(2, 1), cfg)


TYPOS: dict[str, tuple[Callable[[], object], str]] = {
    "store": (lambda: kvstore.create("dist_snyc"), "dist_sync"),
    "store of a Trainer": (lambda: trainer(kvstore="Locl"), "local"),
    "capability": (lambda: kvstore.create("local").is_capable("optimiser"), "optimizer"),
    "optimizer": (lambda: optimizer.create("adma"), "adam"),
    "torch's optimizer": (lambda: optimizer.create("torch:AdmaW"), "torch:adamw"),
    "option of an optimizer": (lambda: optimizer.create("sgd", learnin_rate=1), "learning_rate"),
    "scheduler": (lambda: lr_scheduler.create_scheduler_from_spec({"name": "multifacto"}), "multifactor"),
    "compression": (lambda: trainer(compression_params={"type": "2bits"}), "2bit"),
    "policy": (lambda: ParamSchedule(trainer(), "lr", "CosineAnealing"), "CosineAnnealing"),
    "schedule": (lambda: trainer(schedules=[{"type": "StepLr"}]), "StepLR"),
    "Detectron's policy": (lambda: detectron_schedule({"LR_POLICY": "step_with_decay"}), "steps_with_decay"),
    "section": (lambda: from_config({"optimiser": SGD}), "optimizer"),
    "registered class": (lambda: from_config({"optimizer": {"type": "SDG", "lr": 1}}), "SGD"),
    "paramwise": (lambda: trainer(paramwise={"norm_decay": 0}), "norm_decay_mult"),
    "reducer": (lambda: DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], reducer="tre"), "tree"),
}
SGD = {"type": "SGD", "lr": 1}


@pytest.mark.parametrize(("call", "meant"), TYPOS.values(), ids=TYPOS)
def test_the_name_that_was_meant_is_in_the_message(call: Callable[[], object], meant: str) -> None:
    with pytest.raises(KVStoreError) as raised:
        call()
    question = str(raised.value).lower().partition("did you mean ")[2]
    assert repr(meant).lower() in question.partition("?")[0]


def test_a_strategys_options_are_compared_too(make: Make) -> None:
    with pytest.raises(KVStoreError, match="'clip_grad'"):
        make().prepare(Net(), optim_wrapper={"optimizer": SGD, "clip_gard": {"max_norm": 1}})


def test_nothing_is_asked_where_nothing_is_similar() -> None:
    assert did_you_mean("bogus", ["local", "device"]) == ""
    assert did_you_mean(torch.zeros(1), ["local"]) == did_you_mean(None, ["local"]) == ""


def test_several_wrong_names_are_compared_with_all_right_ones() -> None:
    assert did_you_mean(["lcoal", 3, "devise"], ["local", "device"]) == ". Did you mean 'local' or 'device'?"
