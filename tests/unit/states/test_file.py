"""The file of saved states: whole or not at all when written, and a clear word for whatever is wrong when read."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pickle
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from kvtrainer import Trainer
from kvtrainer.errors import KVStoreError, StateFileError
from kvtrainer.states.format import FORMAT, SavedParameter, SavedStates, read_state_file, write_state_file
from tests.support.damage import damages
from tests.support.limits import LIMIT


def states_of(value: float, numel: int = 1000) -> SavedStates:
    parameter = SavedParameter((numel,), "float32", 0, {"step": 1, "entry": torch.full((numel,), value)})
    return SavedStates({"name": "sgd"}, 1, [{"lr": 0.1}], {"w": parameter})


def value_in(path: Path) -> float:
    return float(read_state_file(path).parameters["w"].state["entry"][-1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of states whose value is 1."""
    found = tmp_path / "states"
    write_state_file(found, states_of(1.0))
    return found


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing more fails, as it does on a full disk; as briefly as possible, for the log of the tests is a file too."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_file_is_read_as_it_was_written_and_replaced_by_the_next(path: Path) -> None:
    assert value_in(path) == 1.0
    write_state_file(str(path), states_of(2.0))
    assert value_in(path) == 2.0
    assert os.listdir(path.parent) == ["states"]


def test_what_was_read_does_not_change_when_the_file_does(path: Path) -> None:
    before = read_state_file(path)
    write_state_file(path, states_of(2.0))
    assert before.parameters["w"].state["entry"].eq(1).all()


def test_file_has_the_rights_of_any_other_new_file(path: Path) -> None:
    other = path.parent / "other"
    other.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_link_stays_and_the_file_behind_it_is_replaced(path: Path) -> None:
    link = path.parent / "latest"
    link.symlink_to(path.name)
    write_state_file(link, states_of(2.0))
    assert link.is_symlink()
    assert value_in(path) == 2.0


def test_full_disk_leaves_the_former_file_and_nothing_else(path: Path) -> None:
    too_much = states_of(2.0, 100_000)
    with (
        files_of_at_most(4096),
        pytest.raises(
            StateFileError, match=r"cannot save states to '.*states': .*What was there before is unch"
        ),
    ):
        write_state_file(path, too_much)
    assert value_in(path) == 1.0
    assert os.listdir(path.parent) == ["states"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_late_failure_leaves_the_former_file(
    path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StateFileError, match="No space left on device") as caught:
        write_state_file(path, states_of(2.0))
    assert isinstance(caught.value, KVStoreError)
    assert isinstance(caught.value, OSError)
    assert value_in(path) == 1.0
    assert os.listdir(path.parent) == ["states"]


def test_file_is_synced_before_its_name_is_set(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        sync(handle)

    def replaced(source: str, target: str) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_state_file(path, states_of(2.0))
    assert calls == ["file", "replace", "folder"]


def test_interrupted_save_leaves_no_temporary_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtrainer.states.format.write_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_state_file(path, states_of(2.0))
    assert os.listdir(path.parent) == ["states"]


def saving(path: Path) -> None:
    write_state_file(path, states_of(1.0))


MISSING, DIRECTORY, IN_A_FILE = "missing/states", "folder", "file/states"


@pytest.mark.parametrize(
    ("action", "name", "native", "number"),
    [
        (read_state_file, MISSING, FileNotFoundError, errno.ENOENT),
        (read_state_file, DIRECTORY, IsADirectoryError, errno.EISDIR),
        (read_state_file, IN_A_FILE, NotADirectoryError, errno.ENOTDIR),
        (saving, MISSING, FileNotFoundError, errno.ENOENT),
        (saving, DIRECTORY, IsADirectoryError, errno.EISDIR),
    ],
)
def test_errors_of_the_system_are_those_of_python(
    tmp_path: Path, action: Any, name: str, native: type[OSError], number: int
) -> None:
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / "file").write_bytes(b"x")
    path = tmp_path / name
    with pytest.raises(StateFileError, match=re.escape(str(path))) as caught:
        action(path)
    assert isinstance(caught.value, native)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.errno, error.filename) == (number, str(path))
        assert (type(error), str(error)) == (type(caught.value), str(caught.value))


def test_an_unreadable_file_is_a_permission_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read all, so the refusal is played."""

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PermissionError, match="cannot load states from") as caught:
        read_state_file(path)
    assert isinstance(caught.value, StateFileError)
    assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(path))


def test_a_file_without_a_name_is_refused_as_such() -> None:
    with pytest.raises(FileNotFoundError, match="the name is empty") as caught:
        write_state_file("", states_of(1.0))
    assert isinstance(caught.value, StateFileError)


def test_save_where_nothing_may_be_written_says_why() -> None:
    """Not even root may, so the test does not depend on who runs it."""
    with pytest.raises(OSError, match=r"cannot save states to '/sys/states': .+ unchanged") as caught:
        write_state_file("/sys/states", states_of(1.0))
    assert isinstance(caught.value, StateFileError)
    assert caught.value.errno in (errno.EACCES, errno.EPERM, errno.EROFS)


def torch_saved() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (torch_saved(), "it is a zip archive, as torch.save writes it"),
        (
            pickle.dumps({"w": [1.0] * 30}),
            "it is a pickle, as MXNet's save_states writes it; pickles are never",
        ),
        (b"\x1f\x8b" + bytes(100), "it is a gzip archive"),
        (b"hello, this is just some text", "it is no safetensors file, or its beginning is damaged"),
        (b"\xff" * 8 + b"{" + bytes(100), "truncated or damaged"),
        (bytes(8) + b"{}", "truncated or damaged"),
    ],
)
def test_file_of_another_kind_is_refused_by_its_kind(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(StateFileError, match=message):
        read_state_file(path)


def test_other_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(StateFileError, match="a safetensors file, but of something else"):
        read_state_file(tmp_path / "weights")


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "states"
    write_state_file(path, states_of(1.0, 4))
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StateFileError):
            read_state_file(path)


def test_every_other_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "states"
    write_state_file(path, states_of(1.0, 4))
    whole = path.read_bytes()

    @given(damages(whole))
    @example(whole[:-1])
    @example(whole + b"x")
    @settings(max_examples=150)
    def check(damaged: bytes) -> None:
        assume(damaged != whole)
        path.write_bytes(damaged)
        with pytest.raises(StateFileError):
            read_state_file(path)

    check()


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StateFileError, match=r"'.*pipe': that is a device, a pipe or a socket"):
        write_state_file(pipe, states_of(1.0))
    assert pipe.is_fifo()


def test_equal_states_make_equal_bytes_whatever_they_were_before(path: Path) -> None:
    first, second = Trainer(nn.Linear(3, 2), "adam"), Trainer(nn.Linear(3, 2), "adam")
    for p in (p for group in first.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    first.step(1)
    found = set()
    for at in range(8):  # of four entries safetensors' own writer would hardly ever make eight equal orders
        first.save_states(path)
        second.load_states(path)
        second.save_states(path.parent / f"{at}")
        found |= {path.read_bytes(), (path.parent / f"{at}").read_bytes()}
    assert len(found) == 1
    with safe_open(path, "pt") as opened:
        assert set(load_file(path)) == set(opened.keys())
        assert opened.metadata()["format"] == FORMAT


_SAVING = """
import sys, torch
from kvtrainer import Trainer
from kvtrainer.strategy.checkpoint import write_checkpoint
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
trainer = Trainer(net, "torch:AdamW", amp="dynamic", accumulate=2)
for _ in range(4):
    trainer.update_params(net(torch.ones(1, 3)).sum())
trainer.save_states(sys.argv[1])
write_checkpoint({"state_dict": net.state_dict(), "meta": {"epoch": 1}}, sys.argv[1] + ".pt")
"""


def test_other_processes_write_the_same_bytes(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", _SAVING, str(tmp_path / seed)]
        subprocess.run(command, env=environment, check=True, timeout=LIMIT)
    for suffix in ("", ".pt"):
        assert (tmp_path / f"1{suffix}").read_bytes() == (tmp_path / f"2{suffix}").read_bytes()


_WRITING = """
import sys
from kvtrainer.states.atomic_file import replace_atomically
with replace_atomically(sys.argv[1]) as file:
    file.write(b"half of it")
    print(end="x", flush=True)
    sys.stdin.read()
"""


def test_the_next_save_removes_what_dead_processes_have_left_and_nothing_else(path: Path) -> None:
    folder = path.parent
    child = subprocess.Popen([sys.executable, "-c", _WRITING, str(path)], stdin=PIPE, stdout=PIPE)
    assert child.stdout
    child.stdout.read(1)
    write_state_file(path, states_of(2.0))
    [living] = {*os.listdir(folder)} - {"states"}  # what a living process writes stays
    child.kill()
    child.communicate(timeout=LIMIT)
    assert os.path.exists(folder / living)
    (folder / ".states-mine.tmp").touch()
    write_state_file(path, states_of(3.0))
    assert value_in(path) == 3.0
    assert {*os.listdir(folder)} == {"states", ".states-mine.tmp"}


def test_a_file_removed_before_its_lock_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, taken = fcntl.flock, []

    def overtaken(file: Any, how: int) -> None:
        if not taken and file.name.endswith(".tmp"):
            taken.append(file.name)
            os.unlink(file.name)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    write_state_file(path, states_of(2.0))
    assert taken
    assert value_in(path) == 2.0
