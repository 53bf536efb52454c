"""Checkpoints of a strategy that were damaged, changed or do not fit: refused, and nothing here is another."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings

from kvtrainer.errors import KVStoreError, StateFileError
from kvtrainer.strategy import Strategy
from tests.support.damage import damages
from tests.support.strategies import AMP, SCHEDULE, Make, Net, steps

MARKS = ("kvtrainer_format", "kvtrainer_checksum")


class Run:
    """A strategy with its parts, and all that a checkpoint could change here."""

    def __init__(self, make: Make, seed: int, steps_made: int) -> None:
        self.strategy = make(env_kwargs={"randomness": {"seed": seed}})
        self.model, self.trainer, _ = self.strategy.prepare(
            Net(), optim_wrapper=AMP, param_scheduler=SCHEDULE, dispatch_kwargs={"max_iters": 12}
        )
        steps(self.model, self.trainer, steps_made)

    def state(self) -> Any:
        saved = self.trainer.export_saved_states()
        parameters = {name: [one.dtype, one.state] for name, one in saved.parameters.items()}
        return exact(
            [
                dict(self.model.state_dict()),
                [saved.optimizer, saved.num_update, saved.groups, parameters, saved.extra, saved.tensors],
                [self.strategy.scheduler_state_dict(), self.strategy.seed, self.strategy.dispatch_kwargs],
                [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()],  # type: ignore
            ]
        )


def exact(value: Any) -> Any:
    """The value to be compared by types, order and bits."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return "dict", [(key, exact(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [exact(one) for one in value]
    return type(value).__name__, repr(value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a checkpoint after six passes."""
    folder = tmp_path_factory.mktemp("saved")
    before = torch.get_rng_state()
    run = Run(partial(Strategy, kvstore="device", work_dir=str(folder)), 1, 6)
    extra = {"meta": {"iter": 6}, "data": {"seen": torch.arange(3), "names": ["a", None, b"b"]}}
    run.strategy.save_checkpoint(str(folder / "a.pt"), extra_ckpt=extra)
    run.strategy.close()
    torch.set_rng_state(before)
    return (folder / "a.pt").read_bytes()


@pytest.fixture
def path(saved: bytes, tmp_path: Path) -> Path:
    """A file of that checkpoint."""
    (tmp_path / "a.pt").write_bytes(saved)
    return tmp_path / "a.pt"


def without_marks(path: Path) -> None:
    """Write a checkpoint as releases before the checksum did."""
    content = torch.load(path, weights_only=True)
    for mark in MARKS:
        del content["meta"][mark]
    torch.save(content, path)


@pytest.mark.parametrize("age", ["new", "old"])
def test_every_damage_is_refused_and_changes_nothing_or_does_no_harm(
    make: Make, path: Path, age: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An old file has no checksum of its contents, but of its records."""
    if age == "old":
        without_marks(path)
    run, whole = Run(make, 9, 3), path.read_bytes()
    rest = exact(run.strategy.resume(str(path)))
    right, outcomes = run.state(), Counter[str]()

    @given(damages(whole))
    @example(whole[:-36] + b"\x08" + whole[-35:])  # the number of a disk, which torch.load does not read
    @settings(max_examples=50, phases=[Phase.explicit, Phase.generate])
    def check(damaged: bytes) -> None:
        caplog.clear()
        steps(run.model, run.trainer, 1)
        before = run.state()
        path.write_bytes(damaged)
        try:
            found = run.strategy.resume(str(path))
        except StateFileError:
            assert run.state() == before
            outcomes["refused"] += 1
        else:
            assert (run.state(), exact(found)) == (right, rest)
            outcomes["harmless"] += 1

    check()
    assert outcomes["refused"] > 33


def test_an_old_files_record_that_is_marked_as_a_folder_is_refused(make: Make, path: Path) -> None:
    """torch.load would give what was in the memory: one flipped bit in the archive's table of contents."""
    without_marks(path)
    run, whole = Run(make, 9, 3), path.read_bytes()
    before = run.state()
    entries = [found.start() for found in re.finditer(b"PK\x01\x02", whole)]
    assert len(entries) > 10
    for at in entries:
        path.write_bytes(whole[: at + 38] + b"\x10" + whole[at + 39 :])
        with pytest.raises(StateFileError):
            run.strategy.resume(str(path))
    assert run.state() == before


def swap(content: dict[str, Any], a: list[Any], b: list[Any]) -> None:
    one, other = place(content, a[:-1]), place(content, b[:-1])
    one[a[-1]], other[b[-1]] = other[b[-1]], one[a[-1]]


def place(content: Any, keys: list[Any]) -> Any:
    for key in keys:
        content = content[key]
    return content


def put(content: dict[str, Any], keys: list[Any], value: Any) -> None:
    place(content, keys[:-1])[keys[-1]] = value


BIAS = ["optimizer", "parameters", "body.bias", "state"]
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "two weights": lambda c: swap(c, ["state_dict", "body.bias"], ["optimizer", *BIAS[1:], "exp_avg"]),
    "two states": lambda c: swap(c, [*BIAS, "exp_avg"], [*BIAS, "exp_avg_sq"]),
    "order of weights": lambda c: put(c, ["state_dict"], dict(reversed(c["state_dict"].items()))),
    "dtype": lambda c: put(c, ["state_dict", "seen"], c["state_dict"]["seen"].int()),
    "shape": lambda c: put(c, ["state_dict", "body.bias"], c["state_dict"]["body.bias"].view(1, 3)),
    "learning rate": lambda c: put(c, ["optimizer", "groups", 0, "lr"], 0.2),
    "type of a number": lambda c: put(c, ["optimizer", "num_update"], float(c["optimizer"]["num_update"])),
    "schedule": lambda c: put(c, ["param_schedulers", 0, "count"], 2),
    "loss scale": lambda c: put(c, ["ranks", 0, "trainers", "", "extra", "loss_scaler"], {"scale": 2.0}),
    "random numbers": lambda c: put(c, ["ranks", 0, "rng", "numpy", "pos"], 7),
    "place": lambda c: put(c, ["meta", "iter"], 5),
    "extra": lambda c: put(c, ["data", "names", 1], False),
    "additional": lambda c: put(c, ["more"], 1),
    "missing": lambda c: c.pop("data"),
    "not plain": lambda c: put(c, ["data", "names"], {1, 2}),
    "no checksum": lambda c: c["meta"].pop("kvtrainer_checksum"),
    "no format": lambda c: c["meta"].pop("kvtrainer_format"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_file_is_refused(make: Make, path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)
    run = Run(make, 9, 3)
    before = run.state()
    with pytest.raises(StateFileError):
        run.strategy.resume(str(path))
    assert run.state() == before


def test_an_old_file_gives_one_warning(make: Make, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = Run(make, 9, 0)
    expected.strategy.resume(str(path))
    assert "checksum" not in caplog.text
    without_marks(path)
    run = Run(make, 9, 0)
    with caplog.at_level("WARNING", "kvtrainer"):
        rest = run.strategy.resume(str(path))
    assert caplog.text.count("has no checksum of its contents") == 1
    assert run.state() == expected.state()
    assert not set(MARKS) & set(rest["meta"])


def test_files_of_others_need_no_checksum(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What torch.save notes of the records suffices; a file of torch before 1.6 has nothing, and that is said."""
    net, path = Net(), tmp_path / "b.pt"
    run = Run(make, 1, 0)
    torch.save(net.state_dict(), path)
    run.strategy.load_checkpoint(str(path))
    assert torch.equal(run.model.head.bias, net.head.bias)
    assert "checksum" not in caplog.text
    whole = path.read_bytes()
    weight = net.body.weight.detach().numpy().tobytes()
    path.write_bytes(whole.replace(weight, bytes(len(weight))))
    with pytest.raises(StateFileError, match="was damaged since it was written"):
        run.strategy.load_checkpoint(str(path))
    torch.save(net.state_dict(), path, _use_new_zipfile_serialization=False)
    with caplog.at_level("WARNING", "kvtrainer"):
        run.strategy.load_checkpoint(str(path))
    assert "damage would not be noticed" in caplog.text


def test_values_of_every_kind_come_back_as_they_were(make: Make, path: Path) -> None:
    values = torch.arange(6.0)
    extra: dict[str, Any] = {
        "numbers": [0, -1, 2**70, 0.1, -0.0, float("inf"), True, None, "", "\ud800 ü", b"\x00"],
        "keys": {1: "a", "1": "b", None: "c", 0.5: []},
        "empty": [{}, [], torch.zeros(0, 2)],
        "tensors": [values.view(2, 3).t(), values[::2], values.bool(), values.half()],
        "small": values.to(torch.float8_e5m2),
        "complex": [torch.complex(values, values).conj(), torch.complex(values, values).conj().imag],
        "scalar": torch.tensor(3),
    }
    run = Run(make, 1, 1)
    run.strategy.save_checkpoint(str(path), extra_ckpt=extra)
    found = run.strategy.load_checkpoint(str(path))
    for name, value in extra.items():
        shown = [repr(one) for one in (found[name], value)]
        assert shown[0] == shown[1]


MALFORMED: list[tuple[str, Any]] = [
    ("groups", None), ("groups", [3]), ("groups", []), ("parameters", {"head.bias": 3}), ("optimizer", {}),
    ("num_update", "x"), ("extra", 3), ("parameters", 3),
]  # fmt: skip
"""Parts of an optimizer's states that make no sense."""
UNFIT: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"{at}={value}": partial(put, keys=["optimizer", at], value=value) for at, value in MALFORMED},
    "weights": lambda c: c["state_dict"].pop("head.bias"),
    "optimizer": lambda c: put(c, [*BIAS, "exp_avg"], torch.zeros(7)),
    "torch's optimizer": lambda c: put(c, ["optimizer"], torch.optim.SGD([torch.zeros(2)]).state_dict()),
    "loss scale": lambda c: put(c, ["ranks", 0, "trainers", "", "extra", "loss_scaler"], {"scale": -1}),
    "schedules": lambda c: put(c, ["param_schedulers"], []),
    "schedule without sense": lambda c: put(c, ["param_schedulers"], [3]),
    "python's random numbers": lambda c: put(c, ["ranks", 0, "rng", "python", "version"], 99),
    "numpy's random numbers": lambda c: put(c, ["ranks", 0, "rng", "numpy", "key"], torch.zeros(3)),
    "torch's random numbers": lambda c: put(c, ["ranks", 0, "rng", "torch"], torch.zeros(3)),
    "ranks": lambda c: put(c, ["ranks"], [3]),
    "seed": lambda c: put(c, ["meta", "seed"], -1),
    "iteration": lambda c: put(c, ["meta", "iter"], "six"),
}  # fmt: skip


@pytest.mark.parametrize("edit", UNFIT.values(), ids=UNFIT)
def test_a_part_that_does_not_fit_is_refused(
    make: Make, path: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    """The file is as it was written; a callback changes what is read, as a user's does with foreign checkpoints."""
    run = Run(make, 9, 3)
    before = run.state()
    with pytest.raises(KVStoreError):
        run.strategy.resume(str(path), callback=edit)
    assert run.state() == before


def test_meta_that_is_no_dict_is_refused_before_anything_is_written(make: Make, path: Path) -> None:
    run, before = Run(make, 1, 1), path.read_bytes()
    with pytest.raises(KVStoreError, match="'meta' of a checkpoint must be a dict"):
        run.strategy.save_checkpoint(str(path), callback=lambda content: put(content, ["meta"], 3))
    assert path.read_bytes() == before
