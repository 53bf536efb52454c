"""Deltas of saved states: with its bases, a delta is what a full save at the same moment is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import kvtrainer
from kvtrainer.errors import ConfigurationError, StateFileError, StateMismatchError

IDS = 60


class Job:
    """A table whose rows come and go, and a layer."""

    def __init__(self, optimizer: str = "adagrad", **options: Any) -> None:
        self.table = kvtrainer.Embedding(
            3, admit_after=2, expire_after=4, max_rows=128, evict="lfu", weight_decay=0.1
        )
        self.linear = torch.nn.Linear(3, 1, bias=False)
        for parameter in self.linear.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        named = [("table", self.table.weight), *self.linear.named_parameters()]
        options = {"learning_rate": 0.1, **options}
        self.trainer = kvtrainer.Trainer(named, optimizer, options, kvstore="local")

    def train(self, *ids: int) -> None:
        self.linear(self.table(torch.tensor(ids))).square().sum().backward()
        self.trainer.step(len(ids))
        for parameter in (self.table.weight, self.linear.weight):
            parameter.grad = None

    def train_twice(self, *ids: int) -> None:
        """Train, so that the rows are admitted."""
        for _ in range(2):
            self.train(*ids)


def loaded(path: Path) -> Job:
    job = Job()
    job.trainer.load_states(path)
    return job


def without_identity(path: Path) -> bytes:
    """The file with zeros for its identity, which it must have."""
    with safe_open(path, framework="pt") as file:
        identity = file.metadata()["identity"]
    data = path.read_bytes()
    assert data.count(identity.encode()) == 1
    return data.replace(identity.encode(), b"0" * len(identity))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.lists(st.integers(-IDS, IDS), min_size=1, max_size=30)),
        st.tuples(st.just("train"), st.lists(st.integers(0, 25), min_size=1, max_size=15)),
        st.tuples(st.just("full"), st.just(0)),
        st.tuples(st.just("delta"), st.integers(0, 9)),
        st.tuples(st.just("delta"), st.integers(0, 1)),
        st.tuples(st.just("load"), st.integers(0, 9)),
    ),
    min_size=3,
    max_size=12,
)


@settings(max_examples=8, deadline=None)
@given(OPERATIONS)
def test_a_delta_with_its_bases_is_what_is_saved_in_full_at_the_same_moment(
    operations: list[tuple[str, Any]],
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        job, files, bases = Job(), list[Path](), set[bytes]()
        job.train_twice(*range(20))
        for number, (what, argument) in enumerate([("full", 0), *operations]):
            path, full = folder / f"{number}", folder / "full"
            chosen = files[-1 - argument % len(files)] if what in ("delta", "load") else path
            if what == "train":
                job.train(*argument)
            elif what == "load":
                job.trainer.load_states(chosen)
                bases = {chosen.read_bytes()}
            elif what == "delta" and chosen.read_bytes() not in bases:
                with pytest.raises(StateMismatchError):
                    job.trainer.save_states(path, base=chosen)
                assert not path.exists()
            else:
                job.trainer.save_states(path, base=chosen if what == "delta" else None)
                files.append(path)
                bases.add(path.read_bytes())
                if what == "delta":
                    job.trainer.save_states(full)
                    kvtrainer.merge_states(path, folder / "merged")
                    assert without_identity(folder / "merged") == without_identity(full)
        other = loaded(files[-1])
        other.trainer.save_states(folder / "loaded")
        kvtrainer.merge_states(files[-1], folder / "merged")
        assert without_identity(folder / "loaded") == without_identity(folder / "merged")


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("adam", {"lazy_update": True}),
        ("groupadagrad", {}),
        ("ftrl", {}),
        ("sgd", {"momentum": 0.9, "lazy_update": True}),
        ("sgd", {"momentum": 0.9}),
    ],
)
def test_the_state_of_any_optimizer_is_in_a_delta(optimizer: str, options: Any, tmp_path: Path) -> None:
    job, other = (Job(optimizer, **options) for _ in range(2))
    for step in range(6):
        job.train(step, 7, 8)
        base = tmp_path / f"{step - 1}" if step else None
        job.trainer.save_states(tmp_path / f"{step}", base=base)
    job.trainer.save_states(tmp_path / "full")
    other.trainer.load_states(tmp_path / "5")
    other.trainer.save_states(tmp_path / "loaded")
    assert (tmp_path / "loaded").read_bytes() == (tmp_path / "full").read_bytes()


def test_a_delta_of_a_table_that_has_had_no_weight_decay_is_refused_for_that_reason(tmp_path: Path) -> None:
    for decay in (0.0, 0.1):
        table = kvtrainer.Embedding(3, weight_decay=decay)
        with kvtrainer.Trainer({"t": table}, "sgd", {"learning_rate": 0.1}, kvstore="local") as trainer:
            if decay:
                trainer.load_states(tmp_path / "base")
            table([1, 2]).sum().backward()
            trainer.step(1)
            if not decay:
                trainer.save_states(tmp_path / "base")
                continue
            with pytest.raises(
                StateMismatchError, match=r"'t\.weight': there are also 'decayed'.*weight_decay"
            ):
                trainer.save_states(tmp_path / "delta", base=tmp_path / "base")
            assert not (tmp_path / "delta").exists()


def test_a_change_of_momentum_moves_rows_that_no_delta_would_have(tmp_path: Path) -> None:
    job = Job("sgd", momentum=0.9)
    job.train_twice(1, 2, 3)
    job.trainer.save_states(tmp_path / "base")
    for group in job.trainer.param_groups:
        group["momentum"] = 0.8
    job.train(1)
    with pytest.raises(StateMismatchError):
        job.trainer.save_states(tmp_path / "delta", base=tmp_path / "base")


def test_a_delta_of_one_row_in_a_hundred_has_three_bytes_in_a_hundred(tmp_path: Path) -> None:
    table, ids = kvtrainer.Embedding(16), torch.arange(10_000)
    options = {"learning_rate": 0.1}
    with kvtrainer.Trainer([("t", table.weight)], "adagrad", options, kvstore="local") as trainer:
        for some, name, base in ((ids, "full", None), (ids[::100], "delta", tmp_path / "full")):
            table(some).sum().backward()
            trainer.step(1)
            table.weight.grad = None
            trainer.save_states(tmp_path / name, base=base)
        full, delta = ((tmp_path / name).stat().st_size for name in ("full", "delta"))
        assert full > 10_000 * (16 + 16 + 2 + 2) * 4
        assert delta <= 0.03 * full


def test_a_loaded_file_is_a_base_and_those_before_it_are_none(tmp_path: Path) -> None:
    first, second, delta = tmp_path / "first", tmp_path / "second", tmp_path / "delta"
    job = Job()
    job.train_twice(1, 2)
    job.trainer.save_states(first)
    job.train(2, 3)
    job.trainer.save_states(second)
    job.trainer.load_states(first)
    job.train_twice(2, 3)
    with pytest.raises(StateMismatchError):
        job.trainer.save_states(delta, base=second)
    job.trainer.save_states(delta, base=first)
    fresh = loaded(delta)
    fresh.train(4, 5)
    fresh.trainer.save_states(tmp_path / "next", base=delta)


def test_a_base_ends_with_whatever_else_than_an_update_replaces_a_table(tmp_path: Path) -> None:
    base, delta = tmp_path / "base", tmp_path / "delta"
    job = Job()
    job.train_twice(1, 2)
    state = job.trainer.state_dict()
    job.trainer.save_states(base)
    job.trainer.load_state_dict(state)
    with pytest.raises(StateMismatchError):
        job.trainer.save_states(delta, base=base)
    job.trainer.save_states(base)
    job.trainer.state[job.table.weight] = job.trainer.state[job.table.weight]
    with pytest.raises(StateMismatchError):
        job.trainer.save_states(delta, base=base)
    job.trainer.save_states(base)
    job.trainer.adopt_saved_states(job.trainer.export_saved_states())
    with pytest.raises(StateMismatchError):
        job.trainer.save_states(delta, base=base)
    job.trainer.save_states(base)
    job.table.load_rows([1], torch.ones(1, 3))
    with pytest.raises(StateMismatchError):
        job.trainer.save_states(delta, base=base)
    assert not delta.exists()


def test_a_base_of_another_trainer_is_none(tmp_path: Path) -> None:
    job, other = Job(), Job()
    for one in (job, other):
        one.train_twice(1, 2)
    job.trainer.save_states(tmp_path / "base")
    with pytest.raises(StateMismatchError):
        other.trainer.save_states(tmp_path / "delta", base=tmp_path / "base")


def test_a_delta_is_refused_where_it_would_be_of_no_use(tmp_path: Path) -> None:
    base, delta = tmp_path / "base", tmp_path / "delta"
    net = torch.nn.Linear(2, 1)
    trainer = kvtrainer.Trainer(net, "sgd", kvstore="local")
    trainer.save_states(base)
    with pytest.raises(ConfigurationError):
        trainer.save_states(delta, base=base)
    job = Job()
    job.train_twice(1, 2)
    with pytest.raises(StateMismatchError):
        job.trainer.save_states(delta, base=base)
    with pytest.raises(FileNotFoundError):
        job.trainer.save_states(delta, base=tmp_path / "missing")
    assert not delta.exists()


def test_a_delta_never_replaces_its_bases_and_lies_beside_them(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    job = Job()
    job.train_twice(1, 2)
    job.trainer.save_states(first)
    job.trainer.save_states(second, base=first)
    before = first.read_bytes(), second.read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(second)
    for target in (first, second, tmp_path / "link", tmp_path / "folder" / "third"):
        with pytest.raises(ConfigurationError):
            job.trainer.save_states(target, base=second)
    with pytest.raises(ConfigurationError):
        kvtrainer.merge_states(second, first)
    assert (first.read_bytes(), second.read_bytes()) == before


def test_a_link_to_a_base_stands_for_it(tmp_path: Path) -> None:
    base, link, delta = tmp_path / "base", tmp_path / "link", tmp_path / "delta"
    job = Job()
    job.train_twice(1, 2)
    job.trainer.save_states(base)
    link.symlink_to(base)
    job.trainer.save_states(delta, base=link)
    link.unlink()
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "latest"
    link.symlink_to(delta)
    loaded(link)


def chain(folder: Path) -> tuple[Path, Path, Path]:
    """A full file and two deltas."""
    job, paths = Job(), tuple(folder / name for name in ("first", "second", "third"))
    for number, path in enumerate(paths):
        job.train(number, number + 1)
        job.train(number, number + 1)
        job.trainer.save_states(path, base=paths[number - 1] if number else None)
    return paths  # type: ignore[return-value]


def rejected(path: Path, error: type[Exception]) -> None:
    """Loading raises, and nothing changes."""
    job = Job()
    job.train_twice(1, 2, 3)
    job.trainer.save_states(path.parent / "before")
    with pytest.raises(error):
        job.trainer.load_states(path)
    with pytest.raises(error):
        kvtrainer.merge_states(path, path.parent / "merged")
    job.trainer.save_states(path.parent / "after")
    assert (path.parent / "after").read_bytes() == (path.parent / "before").read_bytes()
    assert not (path.parent / "merged").exists()


def test_a_missing_base_is_named_and_nothing_changes(tmp_path: Path) -> None:
    first, _, third = chain(tmp_path)
    first.rename(tmp_path / "moved")
    rejected(third, FileNotFoundError)
    (tmp_path / "moved").rename(first)
    loaded(third)


def test_a_base_that_was_saved_again_or_swapped_is_refused(tmp_path: Path) -> None:
    first, second, third = chain(tmp_path)
    kept = first.read_bytes()
    foreign = Job()
    foreign.train_twice(1, 2, 3)
    foreign.trainer.save_states(first)
    rejected(third, StateMismatchError)
    shutil.copy(second, first)
    rejected(third, StateMismatchError)
    with pytest.raises(StateMismatchError):
        foreign.trainer.save_states(tmp_path / "delta", base=third)
    first.write_bytes(kept)
    loaded(third)


def test_a_base_without_hash_tables_is_refused(tmp_path: Path) -> None:
    _, second, third = chain(tmp_path)
    kvtrainer.Trainer(torch.nn.Linear(2, 1), "sgd", kvstore="local").save_states(second)
    rejected(third, StateMismatchError)


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_a_truncated_or_damaged_file_of_a_chain_is_refused(name: str, tmp_path: Path) -> None:
    *_, third = chain(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for damaged in (whole[:-1], whole[:9], whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]):
        (tmp_path / name).write_bytes(damaged)
        rejected(third, StateFileError)


def changed(path: Path, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the description of a file; its checksum is not looked at any more."""
    monkeypatch.setattr("kvtrainer.states.format.checksum_of_state_file", lambda *_: "0")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    content = json.loads(header["__metadata__"]["content"])
    change(content)
    header["__metadata__"] |= {"content": json.dumps(content), "checksum": "0"}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize("name", ["../first", "/etc/passwd", "", ".", "..", "a\0b", "folder/first", "third"])
def test_a_name_of_a_base_that_leaves_the_folder_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, third = chain(tmp_path)
    for path in (second, third):
        changed(path, lambda content: content["base"].__setitem__(0, name), monkeypatch)
    job = Job()
    with pytest.raises((StateFileError, StateMismatchError)):
        job.trainer.load_states(third)
    with pytest.raises((StateFileError, StateMismatchError)):
        job.trainer.load_states(second)


def test_changes_without_a_base_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second, _ = chain(tmp_path)
    changed(second, lambda content: content.pop("base"), monkeypatch)
    with pytest.raises(StateFileError):
        Job().trainer.load_states(second)


def test_a_merged_file_takes_the_place_of_a_delta(tmp_path: Path) -> None:
    first, second, third = chain(tmp_path)
    loaded(third).trainer.save_states(tmp_path / "expected")
    kvtrainer.merge_states(second, second)
    first.unlink()
    loaded(third).trainer.save_states(tmp_path / "found")
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()


def test_equal_states_give_equal_files_with_an_identity(tmp_path: Path) -> None:
    for name in ("a", "b"):
        job = Job()
        job.train_twice(1, 2)
        job.trainer.save_states(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    job.train(1)
    job.trainer.save_states(tmp_path / "c")
    assert without_identity(tmp_path / "c") != without_identity(tmp_path / "a")


def test_states_that_were_loaded_are_a_base_before_the_first_step(tmp_path: Path) -> None:
    first, _, third = chain(tmp_path)
    for name, path in (("full", first), ("delta", third)):
        job = loaded(path)
        job.trainer.save_states(tmp_path / f"{name} 2", base=path)
        loaded(tmp_path / f"{name} 2").trainer.save_states(tmp_path / "found")
        loaded(path).trainer.save_states(tmp_path / "expected")
        assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()
        assert "slice history" not in job.trainer.state_dict()["state"][0]
