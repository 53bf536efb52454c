"""Names in configurations: how classes are registered, found, built and imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvstore_server.optimizer import create, create_from_spec
from kvstore_server.optimizer import registry as of_stores
from kvtrainer import registry
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

TORCHS = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip


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


def test_decorated_class_is_found_by_its_own_name_and_built_from_a_dict(boxes: Registry) -> None:
    assert boxes.register()(Box) is Box
    assert "Box" in boxes
    built = boxes.build({"type": "Box", "a": 1}, a=0, b=2)
    assert built.options == {"a": 1, "b": 2}


@pytest.mark.parametrize("how", ["decorator", "named decorator", "call", "several names"])
def test_every_call_form_of_register_module_registers(boxes: Registry, how: str) -> None:
    if how == "call":
        assert boxes.register_module(module=Box) is Box
    elif how == "decorator":
        boxes.register_module()(Box)
    else:
        boxes.register_module(name="Crate" if how == "named decorator" else ["Crate", "Chest"])(Box)
    names = {"named decorator": ["Crate"], "several names": ["Crate", "Chest"]}.get(how, ["Box"])
    assert [boxes.get(name) for name in names] == [Box] * len(names)
    assert ("Box" in boxes) == (names == ["Box"])


def test_function_or_class_itself_may_be_the_type(boxes: Registry) -> None:
    assert boxes.build({"type": dict, "a": 1}) == {"a": 1}


def test_caller_keeps_his_configuration(boxes: Registry) -> None:
    boxes.register()(Box)
    cfg = {"type": "Box", "a": 1}
    boxes.build(cfg, b=2)
    assert cfg == {"type": "Box", "a": 1}


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
    with pytest.raises(RegistryError, match=r"'Box' is registered as box already: .*\.Box"):
        boxes.register("Box")(dict)
    with pytest.raises(RegistryError):
        boxes.register(["Free", "Box"])(dict)
    assert "Free" not in boxes
    boxes.register("Box", force=True)(dict)
    assert boxes.get("Box") is dict


def test_name_of_an_optimizer_of_torch_is_taken_too() -> None:
    with pytest.raises(RegistryError, match=r"'SGD' is registered as optimizer already: torch"):
        OPTIMIZERS.register()(type("SGD", (torch.optim.SGD,), {}))
    OPTIMIZERS.register()(torch.optim.SGD)
    assert OPTIMIZERS.get("SGD") is torch.optim.SGD


def test_name_is_found_in_another_case_where_there_is_none_in_this(boxes: Registry) -> None:
    boxes.register("BOX")(dict)
    boxes.register("Box")(Box)
    assert boxes.get("Box") is Box
    assert boxes.get("BOX") is dict
    assert boxes.get("box") is dict


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ("Box", TypeError, "a dict, got str"),
        ({"a": 1}, KeyError, "needs a 'type'"),
        ({"type": 3}, TypeError, "is a name, a class or a function, got 3"),
    ],
)
def test_configuration_that_is_none_is_refused(
    boxes: Registry, cfg: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        boxes.build(cfg)
    assert isinstance(caught.value, ConfigurationError)


def test_decorator_without_parentheses_and_things_that_cannot_be_called_are_refused(boxes: Registry) -> None:
    with pytest.raises(ArgumentTypeError, match="written @"):
        boxes.register(Box)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="is a class or a function"):
        boxes.register("three")(3)  # type: ignore[type-var]


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
    with pytest.raises(UnregisteredNameError, match=r"Broken \(RuntimeError: no disk\)"):
        boxes.get("Broken")


@pytest.mark.parametrize("name", TORCHS)
def test_every_torch_optimizer_is_built_by_its_name(name: str) -> None:
    p = Parameter(torch.ones(2))
    assert type(OPTIMIZERS.build({"type": name, "lr": 0.1}, params=[p])) is getattr(torch.optim, name)


def test_names_of_optimizers_are_torchs_before_gluons() -> None:
    assert OPTIMIZERS.get("sgd") is OPTIMIZERS.get("SGD") is OPTIMIZERS.get("torch:SGD") is torch.optim.SGD
    assert OPTIMIZERS.get("gluon:sgd") is type(create("sgd"))
    assert OPTIMIZERS.get("Signum") is OPTIMIZERS.get("gluon:signum") is type(create("signum"))
    with pytest.raises(KeyError, match="Did you mean 'Adam"):
        OPTIMIZERS.get("Adamm")


@pytest.mark.usefixtures("_own_optimizers")
def test_registered_torch_class_is_known_to_stores_which_give_it_whole_keys() -> None:
    @OPTIMIZERS.register_module()
    class Mine(torch.optim.SGD):
        pass

    assert OPTIMIZERS.get("Mine") is Mine
    there = create_from_spec(create(Mine, lr=0.5).spec())
    assert there.registered_name == "torch:Mine"
    assert not there.elementwise


@pytest.mark.usefixtures("_own_optimizers")
def test_class_that_was_declared_elementwise_stays_so() -> None:
    class Mine(torch.optim.SGD):
        pass

    of_stores.register(Mine)
    OPTIMIZERS.register()(Mine)
    assert create(Mine, lr=0.5).elementwise


def test_built_in_constructors_and_hooks_are_found_by_name() -> None:
    assert registry.OPTIMIZER_BUILDERS is registry.OPTIMIZER_CONSTRUCTORS
    assert "DefaultOptimizerConstructor" in registry.OPTIMIZER_CONSTRUCTORS
    for name in ("GradientCumulativeFp16OptimizerHook", "CosineRestartLrUpdaterHook"):
        assert registry.HOOKS.get(name).__name__ == name


def test_custom_imports_import_modules_that_register(modules: Path) -> None:
    (modules / "imported_by_name.py").write_text("loaded = True")
    import_modules("imported_by_name")
    import_modules(["imported_by_name"])
    assert sys.modules["imported_by_name"].loaded


def test_module_that_is_missing_raises_or_warns_as_the_configuration_says() -> None:
    with pytest.raises(ImportError, match="'no_such_module' of custom_imports") as caught:
        import_modules(["no_such_module"])
    assert isinstance(caught.value, CustomImportError)
    with pytest.warns(FailedImportWarning, match="'no_such_module'"):
        import_modules(["no_such_module"], allow_failed_imports=True)
    with pytest.raises(TypeError, match="list of module names"):
        import_modules([3])  # type: ignore[list-item]
