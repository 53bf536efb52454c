"""Memory and CPU seconds of the processes of a job, at moments that its worker 0 asks for with `steps.mark`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_KIB = 1 << 10


@dataclass(frozen=True)
class Usage:
    """Of processes together: CPU seconds since their start, peak resident bytes, and proportional bytes now."""

    cpu: float = 0.0
    peak_rss: int = 0
    pss: int | None = 0
    """None where the system does not let it be read."""
    own: int | None = 0
    """The same without pages of files: of a library a process has the less, the more others use it, of whatever job."""

    def __add__(self, other: Usage) -> Usage:
        pss = None if self.pss is None or other.pss is None else self.pss + other.pss
        own = None if self.own is None or other.own is None else self.own + other.own
        return Usage(self.cpu + other.cpu, self.peak_rss + other.peak_rss, pss, own)


class Marks:
    """Files OUT.N.base, OUT.N.begin and OUT.N.end of a job: each is a question how much work N has used so far.

    `prepare` is called with N before work N, which waits for it.
    """

    def __init__(self, out: Path, pids: Sequence[int], prepare: Callable[[int], object]) -> None:
        self._out, self._pids, self._prepare = out, pids, prepare
        self._seen: dict[str, Usage] = {}

    def serve(self) -> None:
        """Answer the questions that are there; what asked goes on then."""
        for path in self._out.parent.glob(f"{self._out.name}.*"):
            name = path.name.removeprefix(f"{self._out.name}.")
            if path.suffix == ".base":
                self._prepare(int(name.partition(".")[0]))
                forget_peaks(self._pids)
            self._seen[name] = measure(self._pids)
            path.unlink()

    def add_to(self, measured: dict[str, dict[str, Any]]) -> None:
        """Add to each work its "usage", if it has asked.

        "cpu" is seconds between begin and end, "peak_rss" bytes between base and end, "pss" bytes at the end, and
        "grown", in a job of one work alone, the proportional bytes since base, those of files left out: former works
        may leave memory behind.
        """
        for at, values in enumerate(measured.values()):
            base, begin, end = (self._seen.get(f"{at}.{name}") for name in ("base", "begin", "end"))
            if base is None or begin is None or end is None:
                continue
            values["usage"] = {"cpu": end.cpu - begin.cpu, "peak_rss": end.peak_rss, "pss": end.pss}
            if len(measured) == 1:
                values["usage"]["grown"] = None if end.own is None or base.own is None else end.own - base.own


def measure(pids: Sequence[int]) -> Usage:
    """Usage of processes and all their descendants."""
    total = Usage()
    for pid in with_descendants(pids):
        with contextlib.suppress(OSError):
            total += _measure_one(pid)
    return total


def forget_peaks(pids: Sequence[int]) -> None:
    """Have peaks of processes and their descendants begin at what they occupy now."""
    for pid in with_descendants(pids):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _measure_one(pid: int) -> Usage:
    fields = _stat(pid)
    status = _fields_in_kib(f"/proc/{pid}/status")
    try:
        proportional = _fields_in_kib(f"/proc/{pid}/smaps_rollup")
    except OSError:
        proportional = {}
    pss, in_files = proportional.get("Pss"), proportional.get("Pss_File")
    own = None if pss is None or in_files is None else pss - in_files
    # utime and stime, and those of children that were waited for are not counted: each is looked at while it runs.
    return Usage((int(fields[11]) + int(fields[12])) / _TICKS, status.get("VmHWM", 0), pss, own)


def with_descendants(pids: Sequence[int]) -> set[int]:
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry)] = int(_stat(int(entry))[1])
    found, before = set(pids), 0
    while len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second, a name, may hold blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _fields_in_kib(path: str) -> dict[str, int]:
    lines = (line.split() for line in Path(path).read_text().splitlines() if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines}
