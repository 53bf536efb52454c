"""Names in configurations: how classes are registered, found, built and imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvstore_server.optimizer import create, create_from_spec
from kvstore_server.optimizer import registry as of_stores
from kvtrainer import hooks, registry
from kvtrainer.config import import_modules
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    CustomImportError,
    FailedImportWarning,
    RegistryError,
    UnknownNameError,
    UnregisteredNameError,
)
from kvtrainer.registry import OPTIMIZERS, Registry
from tests.support.processes import ROOT


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


def test_broken_plugin_is_named_in_the_error_and_does_not_keep_others_from_working(
    boxes: Registry, modules: Path
) -> None:
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
def test_what_cannot_be_registered_or_built_is_refused(
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
def test_registered_torch_class_is_known_to_stores_which_give_it_whole_keys_unless_declared(
    is_elementwise: bool,
) -> None:
    class Mine(torch.optim.SGD):
        pass

    if is_elementwise:
        of_stores.register(Mine)
    OPTIMIZERS.register_module()(Mine)
    assert OPTIMIZERS.get("Mine") is Mine
    there = create_from_spec(create(Mine, lr=0.5).spec())
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
