"""Which checkpoint is loaded, and what may be in a file."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer.errors import ConfigurationError, StateFileError, StateMismatchError
from kvtrainer.strategy.checkpoint import find_last
from tests.support.strategies import Make, Net, make

__all__ = ["make"]


class TestFinding:
    def saved(self, make: Make, name: str) -> Any:
        strategy = make()
        strategy.prepare(Net())
        strategy.save_checkpoint(os.path.join(strategy.work_dir, name), extra_ckpt={"name": name})
        return strategy

    def test_nothing_is_loaded_unless_asked_for_or_found(self, make: Make) -> None:
        strategy = make()
        strategy.prepare(Net())
        assert strategy.load_or_resume() is None
        assert strategy.load_or_resume(resume=True) is None

    def test_the_latest_one_is_found_unless_another_is_named(self, make: Make) -> None:
        self.saved(make, "a.pt")
        strategy = self.saved(make, "b.pt")
        options = [
            ({"resume": True}, "b.pt"),
            ({"resume": os.path.join(strategy.work_dir, "a.pt")}, "a.pt"),
            ({"resume": True, "load_from": os.path.join(strategy.work_dir, "a.pt")}, "a.pt"),
            ({"load_from": os.path.join(strategy.work_dir, "a.pt")}, "a.pt"),
            ({"resume": Path(strategy.work_dir, "a.pt")}, "a.pt"),
            ({"resume": True, "load_from": Path(strategy.work_dir, "a.pt")}, "a.pt"),
            ({"load_from": Path(strategy.work_dir, "a.pt")}, "a.pt"),
        ]
        calls: list[str] = []
        kept = strategy.resume
        strategy.resume = lambda name: calls.append(name) or kept(name, resume_optimizer=False)  # type: ignore
        for given, name in options:
            assert strategy.load_or_resume(**given)["name"] == name
        assert [os.path.basename(name) for name in calls] == ["b.pt", *["a.pt"] * 4]

    @pytest.mark.parametrize("name", ["a.pt", "weights/last/a.pt"])
    def test_it_is_found_after_its_directory_was_moved(self, make: Make, tmp_path: Path, name: str) -> None:
        strategy = self.saved(make, name)
        moved = tmp_path / "moved"
        os.rename(strategy.work_dir, moved)
        assert find_last(str(moved)) == str(moved / name)

    def test_a_note_that_cannot_be_read_is_no_reason_to_begin_anew(self, make: Make) -> None:
        strategy = self.saved(make, "a.pt")
        Path(strategy.work_dir, "last_checkpoint").write_bytes(b"\xff\xfe")
        with pytest.raises(StateFileError, match=r"cannot read in .* which checkpoint is the latest"):
            strategy.load_or_resume(resume=True)


class TestReading:
    def load(self, make: Make, name: str, **options: Any) -> Any:
        strategy = make()
        strategy.prepare(Net())
        return strategy.load_checkpoint(name, **options)

    def test_it_needs_a_model(self, make: Make) -> None:
        with pytest.raises(ConfigurationError, match=r"call prepare\(\) first"):
            make().load_checkpoint("a.pt")
        with pytest.raises(ConfigurationError, match=r"call prepare\(\) first"):
            make().save_checkpoint("a.pt")

    def test_file_of_weights_alone_is_a_checkpoint(self, make: Make, tmp_path: Path) -> None:
        torch.save(Net().state_dict(), tmp_path / "a.pt")
        assert self.load(make, f"file://{tmp_path}/a.pt", strict=True) == {}

    def test_a_damaged_file_is_named_whatever_torch_stumbles_over(self, make: Make, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        torch.save(Net().state_dict(), path, _use_new_zipfile_serialization=False)
        whole = path.read_bytes()
        strategy = make()
        strategy.prepare(Net())
        for at in range(0, 120, 3):
            path.write_bytes(whole[:at] + b"." + whole[at + 1 :])
            with suppress(StateFileError, StateMismatchError):
                strategy.load_checkpoint(str(path), strict=True)

    def test_files_that_are_none_are_named(self, make: Make, tmp_path: Path) -> None:
        for name, content in (("empty.pt", b""), ("text.pt", b"hello there, no checkpoint")):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(StateFileError, match=name):
                self.load(make, str(tmp_path / name))
        natives: list[tuple[Path, type[OSError]]] = [
            (tmp_path / "missing.pt", FileNotFoundError),
            (tmp_path, IsADirectoryError),
        ]
        for path, native in natives:
            with pytest.raises(native) as caught:
                self.load(make, str(path))
            assert isinstance(caught.value, StateFileError)
            assert caught.value.filename == str(path)
        torch.save([1], tmp_path / "list.pt")
        with pytest.raises(StateFileError, match="holds a list"):
            self.load(make, str(tmp_path / "list.pt"))
        torch.save({"epoch": 1}, tmp_path / "other.pt")
        with pytest.raises(StateFileError, match="it has no 'state_dict', but epoch"):
            self.load(make, str(tmp_path / "other.pt"))

    def test_code_in_a_file_is_not_run(self, make: Make, tmp_path: Path) -> None:
        torch.save({"state_dict": {}, "model": nn.Linear(1, 1)}, tmp_path / "a.pt")
        with pytest.raises(StateFileError, match="holds more than tensors and plain values"):
            self.load(make, str(tmp_path / "a.pt"))

    @pytest.mark.parametrize(
        "name", ["torchvision://resnet50", "open-mmlab://vgg16", "modelzoo://x", "s3://bucket/a.pt"]
    )
    def test_model_zoos_are_refused_by_name(self, make: Make, name: str) -> None:
        with pytest.raises(ConfigurationError, match=name.partition(":")[0]):
            self.load(make, name)

    def test_addresses_are_downloaded_once_over_protected_connections_only(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def download(url: str, path: str, progress: bool) -> None:
            asked.append(url)
            torch.save({"state_dict": Net().state_dict(), "from": url}, path)

        monkeypatch.setattr(torch.hub, "download_url_to_file", download)
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
        urls = ["https://one.example/a.pt", "https://two.example/a.pt", "https://one.example/a.pt"]
        assert [self.load(make, url)["from"] for url in urls] == urls
        assert asked == urls[:2]
        with pytest.raises(ConfigurationError, match="unprotected"):
            self.load(make, "http://one.example/a.pt")

    def test_strict_loading_refuses_what_differs(self, make: Make, tmp_path: Path) -> None:
        torch.save({"state_dict": nn.Linear(2, 3).state_dict()}, tmp_path / "a.pt")
        with pytest.raises(StateMismatchError):
            self.load(make, str(tmp_path / "a.pt"), strict=True)
        assert self.load(make, str(tmp_path / "a.pt"), revise_keys=[("^", "body.")]) == {}
