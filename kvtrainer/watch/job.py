"""The state of a job, computed from what its servers report at two moments.

These are pure functions, so that all displays show the same. Counts become rates: the difference between the two
moments, divided by the time between them on the clock of the process that counted. A server's counts use the server's
clock, a worker's counts the worker's; so the rounds of a synchronous job agree with the steps of its workers.

A worker talks to every server, so the reports of several servers about it are combined: the worst state, the longest
silence, the greatest delay. A server or worker that was restarted between the two moments counts from zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_server.check import is_loopback

Facts = Mapping[str, Any]
"""What one server reports; see `kvstore_server.engine.membership`."""
SILENT = 3.0
"""Seconds of silence after which a worker, which reports once a second, is considered inactive."""
_WORST_FIRST = ("failed", "absent", "left", "here")


class JobStatus(NamedTuple):
    """What all servers reported at one moment; None for those that did not answer."""

    at: float
    """In seconds."""
    facts: Sequence[Facts | None]


class ServerStatus(NamedTuple):
    address: str
    is_there: bool
    memory: int = 0
    """Bytes reserved for jobs, and shared with workers of the host."""
    max_memory: int = 0
    bytes_in: float = 0.0
    """Bytes of weights and gradients per second."""
    bytes_out: float = 0.0
    is_stopping: bool = False
    queued: int = 0
    """Bytes of answers that slow workers have not read yet."""
    cpu: float = 0.0
    """CPU time used, as a share of one core."""
    cpu_seconds: float = 0.0
    """CPU seconds used since it started."""
    uptime: float = 0.0
    """Seconds since it started."""
    received: Mapping[str, int] = {}
    """Job → bytes of gradients and weights received since it started."""
    sent: Mapping[str, int] = {}
    refused: int = 0
    """Connections and messages that it has refused or ended."""
    is_open: bool = False
    """Whether everybody who reaches it may use it, from other hosts, too."""

    @property
    def notes(self) -> str:
        """What is unusual about it, for people."""
        told = {
            "stopping": self.is_stopping,
            "unauthenticated": self.is_open,
            f"{self.refused} refused": self.refused,
        }
        return ", ".join(text for text, is_so in told.items() if is_so)


class WatchedWorker(NamedTuple):
    """One rank of a job. Shares are fractions of the time between two reports."""

    rank: int
    state: str
    """"here", "absent" (it never connected), "left" or "failed"."""
    why: str
    """Why it left."""
    address: str
    silence: float
    """Seconds since its last message; -1 if it is not there."""
    late: float
    """Fraction of the time when the others' gradients had arrived and this one's had not."""
    waits: float
    """Fraction of the time when it waited for servers and other workers."""
    works: float
    """Fraction of the time between its steps: data, forward and backward."""
    steps: float
    """Per second."""
    samples: float
    """Per second; 0 if the script does not report it."""
    loss: float | None
    round: int
    """Its own round in asynchronous modes, otherwise -1."""
    is_done: bool
    """Whether it has no more data."""
    left_out: int = 0
    """How many rounds have ended without its gradient, because it came too late."""
    steps_total: int = 0
    """Since its process started."""
    samples_total: int = 0
    behind: int | None = None
    """Rounds behind the furthest worker in asynchronous modes, otherwise None."""

    @property
    def is_here(self) -> bool:
        return self.state == "here"

    @property
    def silence_or_none(self) -> float | None:
        """Seconds since its last message; None if it is not there."""
        return None if self.silence < 0 else self.silence


class WaitStatus(NamedTuple):
    """Something that ranks wait for on a server."""

    what: str
    seconds: float
    missing: list[int]


class RoundTimes(NamedTuple):
    """A histogram of the seconds from the end of one round of a table to the end of its next."""

    bounds: Sequence[float] = ()
    """Upper bounds of the buckets. One more bucket counts what is above."""
    counts: Sequence[int] = ()
    total: float = 0.0
    """Sum of the durations."""


class WatchedJob(NamedTuple):
    """One group of workers on the servers."""

    name: str
    mode: str
    num_workers: int
    rounds: float
    """Per second. In asynchronous modes each contribution counts."""
    rounds_total: int
    updates: int
    age: float
    """Seconds since its first worker connected."""
    round_times: RoundTimes
    """From the server with the most rounds."""
    keys: int
    workers: list[WatchedWorker]
    waits: list[WaitStatus]
    errors: list[str]

    @property
    def slowest(self) -> WatchedWorker | None:
        """The worker that the others waited for longest, or None if none waited."""
        late = [one for one in self.workers if one.late > 0]
        return max(late, key=lambda one: one.late, default=None)

    @property
    def last(self) -> WatchedWorker | None:
        """The worker that is furthest behind the first in asynchronous modes, or None."""
        behind = [one for one in self.workers if one.is_here and one.behind]
        return max(behind, key=lambda one: one.behind or 0, default=None)

    @property
    def step(self) -> int:
        """Steps of the furthest worker, or rounds if workers report no steps."""
        return max([one.steps_total for one in self.workers], default=0) or self.rounds_total

    @property
    def longest_wait_seconds(self) -> float:
        return max([one.seconds for one in self.waits], default=0.0)

    @property
    def samples(self) -> float:
        return sum([one.samples for one in self.workers])

    @property
    def samples_total(self) -> int:
        return sum([one.samples_total for one in self.workers])

    @property
    def loss(self) -> float | None:
        told = [one.loss for one in self.workers if one.loss is not None]
        return sum(told) / len(told) if told else None


class JobView(NamedTuple):
    """All servers and jobs at one moment."""

    at: float
    servers: list[ServerStatus]
    jobs: list[WatchedJob]


def job_view_of(before: JobStatus, now: JobStatus, addresses: Sequence[str]) -> JobView:
    """Compute a view from what the servers at `addresses` reported at two moments."""
    pairs = [(_same_server_before(*pair), pair[1]) for pair in zip(before.facts, now.facts, strict=True)]
    seconds = [_seconds_between_reports(*pair) for pair in pairs]
    servers = [
        _server_status(*pair, passed, where)
        for pair, passed, where in zip(pairs, seconds, addresses, strict=True)
    ]
    names = dict.fromkeys(job["name"] for facts in now.facts if facts is not None for job in facts["jobs"])
    jobs = [
        _merge_reported_job(
            [
                (_job_named(a, name), _job_named(b, name), passed)
                for (a, b), passed in zip(pairs, seconds, strict=True)
            ]
        )
        for name in names
    ]
    return JobView(now.at, servers, [job for job in jobs if job.keys or not _has_inner_job(job.name, names)])


def _has_inner_job(name: str, names: Collection[str]) -> bool:
    """Return whether a namespace contains others, as a store's contains its Trainers'. It needs keys to be shown."""
    return any(other.startswith(f"{name}/") for other in names)


def job_view_as_values(view: JobView) -> dict[str, Any]:
    """Return a view as plain values, for JSON."""
    jobs = []
    for job in view.jobs:
        slowest = job.slowest
        jobs.append(
            {
                **job._asdict(),
                "workers": [worker._asdict() for worker in job.workers],
                "waits": [wait._asdict() for wait in job.waits],
                "slowest": None if slowest is None else slowest.rank,
                "round_times": job.round_times._asdict(),
                "step": job.step,
                "samples": job.samples,
                "loss": job.loss,
            }
        )
    return {
        "at": view.at,
        "servers": [{**one._asdict(), "notes": one.notes} for one in view.servers],
        "jobs": jobs,
    }


def _job_named(facts: Facts | None, name: str) -> Facts | None:
    jobs = () if facts is None else facts["jobs"]
    return next((job for job in jobs if job["name"] == name), None)


def _same_server_before(before: Facts | None, now: Facts | None) -> Facts | None:
    """Return a server's earlier report if it is from the same process; a restarted server counts from zero."""
    is_same = before is not None and now is not None and before["uptime"] <= now["uptime"]
    return before if is_same else None


def _seconds_between_reports(before: Facts | None, now: Facts | None) -> float:
    """Return the time between two reports on the server's clock, which is above 0."""
    return max(now["clock"] - before["clock"], 1e-9) if before is not None and now is not None else 1e-9


def _server_status(before: Facts | None, now: Facts | None, seconds: float, address: str) -> ServerStatus:
    if now is None:
        return ServerStatus(address, is_there=False)
    pairs = [(_job_named(before, job["name"]) or job, job) for job in now["jobs"]]
    bytes_in = sum([new["bytes_in"] - old["bytes_in"] for old, new in pairs]) / seconds
    bytes_out = sum([new["bytes_out"] - old["bytes_out"] for old, new in pairs]) / seconds
    cpu = 0.0
    if before is not None:
        cpu = (now["cpu_seconds"] - before["cpu_seconds"]) / max(now["uptime"] - before["uptime"], 1e-9)
    return ServerStatus(
        address,
        True,
        now["memory"],
        now["max_memory"],
        bytes_in,
        bytes_out,
        now["is_stopping"],
        now["queued"],
        cpu,
        now["cpu_seconds"],
        now["uptime"],
        {job["name"]: job["bytes_in"] for job in now["jobs"]},
        {job["name"]: job["bytes_out"] for job in now["jobs"]},
        now["refused"],
        not now["is_authenticated"] and not is_loopback(address.rpartition("/")[2].rpartition(":")[0]),
    )


def _merge_reported_job(told: Sequence[tuple[Facts | None, Facts | None, float]]) -> WatchedJob:
    """Combine what the servers report about one job: (before, now, seconds between) for each server."""
    known = [(before or now, now, seconds) for before, now, seconds in told if now is not None]
    nows = [now for _, now, _ in known]
    first = nows[0]
    busiest = max(nows, key=lambda one: one["rounds"])
    times = busiest["round_seconds"]
    ranks = range(min(first["num_workers"], len(first["workers"])))
    return WatchedJob(
        first["name"],
        f"ssp({first['staleness']})" if first["mode"] == "ssp" else first["mode"],
        first["num_workers"],
        max([(now["rounds"] - before["rounds"]) / seconds for before, now, seconds in known]),
        busiest["rounds"],
        max([one["updates"] for one in nows]),
        max([one["age"] for one in nows]),
        RoundTimes(times["bounds"], times["counts"], times["sum"]),
        max([one["keys"] for one in nows]),
        _workers_with_distances([_merge_reported_worker(known, rank) for rank in ranks]),
        _merge_reported_waits([WaitStatus(**one) for now in nows for one in now["waits"]]),
        list(dict.fromkeys(one["text"] for now in nows for one in now["errors"])),
    )


def _workers_with_distances(workers: list[WatchedWorker]) -> list[WatchedWorker]:
    """Set how far workers in asynchronous modes are behind the first one."""
    first = max([one.round for one in workers], default=-1)
    return [one if one.round < 0 else one._replace(behind=first - one.round) for one in workers]


def _merge_reported_waits(told: Sequence[WaitStatus]) -> list[WaitStatus]:
    """Merge reports of one wait by several servers, keeping the longest."""
    longest: dict[tuple[str, tuple[int, ...]], WaitStatus] = {}
    for one in sorted(told, key=lambda wait: wait.seconds):
        longest[one.what, tuple(one.missing)] = one
    return sorted(longest.values(), key=lambda wait: -wait.seconds)


def _seconds_late(job: Facts, rank: int) -> float:
    """Return how many seconds others have waited for a rank, including a wait in progress."""
    late: float = job["workers"][rank]["late"]
    return late + max([one["seconds"] for one in job["waits"] if rank in one["missing"]], default=0.0)


def _seconds_waiting(job: Facts, rank: int) -> float:
    """Return the seconds of the wait that a rank is in. The rank itself reports it only when it is over."""
    # In asynchronous modes a wait belongs to one rank, and does not name it.
    if job["mode"] != "sync":
        return 0.0
    waits = [one["seconds"] for one in job["waits"] if one["missing"] and rank not in one["missing"]]
    return max(waits, default=0.0)


def _merge_reported_worker(known: Sequence[tuple[Facts, Facts, float]], rank: int) -> WatchedWorker:
    """Combine what the servers report about one worker."""
    # 1. The reports of this rank, and the newest of what the worker says about itself.
    told = [(before["workers"][rank], now["workers"][rank]) for before, now, _ in known]
    nows = [now for _, now in told]
    silence = max([one["silence"] for one in nows])
    worst = min(nows, key=lambda one: _WORST_FIRST.index(one["state"]))
    before, now = max(told, key=lambda pair: pair[1]["says"].get("seconds", -1.0))
    says, said = now["says"], before["says"]
    passed = says.get("seconds", 0.0) - said.get("seconds", 0.0)
    # Nothing new was reported since: use averages over the whole run.
    if passed <= 0 and silence < SILENT:
        said, passed = {}, says.get("seconds", 0.0)
    # 2. Rates over the worker's own clock; delays over the servers'.
    waits = max(
        [
            (_seconds_waiting(b, rank) - _seconds_waiting(a, rank)) / max(passed, seconds)
            for a, b, seconds in known
        ]
    )

    def rate(name: str) -> float:
        return max(says.get(name, 0.0) - said.get(name, 0.0), 0.0) / passed if passed > 0 else 0.0

    return WatchedWorker(
        rank=worst["rank"],
        state=worst["state"],
        why=worst["why"],
        address=worst["address"],
        silence=silence,
        late=_clamp_to_fraction(
            max([(_seconds_late(b, rank) - _seconds_late(a, rank)) / seconds for a, b, seconds in known])
        ),
        waits=_clamp_to_fraction(rate("wait_seconds") + waits),
        works=_clamp_to_fraction(1.0 - rate("step_seconds") - waits)
        if says.get("steps") and passed > 0
        else 0.0,
        steps=rate("steps"),
        samples=rate("samples"),
        loss=says.get("loss"),
        round=max([one["round"] for one in nows]),
        is_done=all(one["joined"] for one in nows),
        left_out=max([one.get("left_out", 0) for one in nows]),
        steps_total=int(says.get("steps", 0)),
        samples_total=int(says.get("samples", 0)),
    )


def _clamp_to_fraction(value: float) -> float:
    return min(max(value, 0.0), 1.0)
