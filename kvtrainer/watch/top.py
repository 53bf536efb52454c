"""`kvtop`: shows a running job in a terminal, as JSON, or over HTTP to browsers and Prometheus.

The HTTP server runs in its own process and only reads:

    /            the page; it requests only the following, and nothing from other hosts
    /view.json   the last views, oldest first
    /metrics     the last view in Prometheus's text format
    /healthz     200 while a server answers, otherwise 503 with the reason

To stop DNS rebinding, where a page of another site makes a browser send requests here under its own host name, a
request must name an IP address, `localhost`, or the host that was given.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from kvstore_server import __version__
from kvstore_server.check import RemovedFlag, is_loopback
from kvstore_server.errors import ConfigurationError, KVStoreError
from kvstore_server.keys import KEYS, OFF, TOKEN, ClientKeys, read_token
from kvstore_server.probe import probe_servers, read_probe_keys
from kvtrainer.common.env import SERVERS, read_servers_from_env
from kvtrainer.watch.job import (
    SILENT,
    JobStatus,
    JobView,
    ServerStatus,
    WatchedJob,
    WatchedWorker,
    job_view_as_values,
    job_view_of,
)

WINDOW = 5.0
"""Rates are averages over this many seconds, so that they do not jump with workers' reports, one a second."""
BRIEF = 1.0
"""Waits shorter than this many seconds are not shown, because every round has some."""

_DESCRIPTION = """\
Show what a running job does: workers and who is late, servers, rates, and what waits for whom.

SERVER is the address that a server has printed, as in KVSTORE_SERVERS, which counts where none is given. kvtop only
looks, and may come and go as it likes. Servers with keys want one: KVSTORE_KEYS names the directory,
but for jobs that you have started yourself on this host.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return its exit code.

    Wrong usage raises SystemExit with code 2.
    """
    # 1. Check the arguments.
    parser = _make_top_parser()
    options = parser.parse_args(argv)
    try:
        addresses = read_servers_from_env(os.environ, ",".join(options.servers) or None)
    except ConfigurationError as error:
        parser.exit(2, f"kvtop: {error}\n")
    token, directory = "", os.environ.get(KEYS, "")
    is_public = options.http is not None and not is_loopback(options.http[0])
    if is_public and directory not in ("", OFF):
        try:
            token = read_token(directory)
        except ConfigurationError as error:
            parser.exit(2, f"kvtop: {error}\n")
    elif is_public and not options.allow_unauthenticated_bind:
        host = options.http[0]
        parser.exit(
            2,
            f"kvtop: {host} can be reached from other hosts; add --allow-unauthenticated-bind if they may look\n",
        )
    if addresses is None:
        parser.exit(2, f"kvtop: no servers to look at: name them, or set {SERVERS}\n")
    # 2. Show the views in the form that was asked for.
    try:
        views = follow_job(addresses, options.interval, keys=read_probe_keys(os.environ, addresses))
        if options.once or options.json:
            return _print_top_once(next(views), options.json)
        if options.http is not None:
            host, port = options.http
            return _serve_page(views, options.with_parent, host, port, token, directory)
        return _show_live(views)
    except KVStoreError as error:
        print(f"kvtop: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(
            f"kvtop: {error}; pip install 'kvtrainer[watch]' brings it, and --json needs nothing",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 0


def follow_job(
    addresses: Sequence[str],
    interval: float,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
    keys: ClientKeys | None = None,
) -> Iterator[JobView]:
    """Query servers repeatedly and yield a view each time, the first after one interval (seconds).

    Rates are averages over WINDOW seconds, or over one interval if that is longer.
    """
    looks = deque([JobStatus(clock(), probe_servers(addresses, interval, keys))])
    while True:
        # Bounded on both sides, because the clock may be set back meanwhile.
        pause(min(interval, max(0.0, looks[-1].at + interval - clock())))
        looks.append(JobStatus(clock(), probe_servers(addresses, interval, keys)))
        while len(looks) > 2 and not 0 <= looks[-1].at - looks[0].at <= WINDOW:
            looks.popleft()
        yield job_view_of(looks[0], looks[-1], addresses)


def _print_top_once(view: JobView, as_json: bool) -> int:
    """Print one view. The exit code is 1 if no server answered."""
    if as_json:
        print(json.dumps(job_view_as_values(view)))
    else:
        from rich.console import Console

        Console().print(render_view(view))
    return 0 if any(server.is_there for server in view.servers) else 1


def _show_live(views: Iterator[JobView]) -> int:
    from rich.live import Live

    with Live(refresh_per_second=4, screen=sys.stdout.isatty()) as live:
        for view in views:
            live.update(render_view(view), refresh=True)
    return 0


def _serve_page(
    views: Iterator[JobView], parent: int | None, host: str, port: int, token: str = "", keys: str = ""
) -> int:
    """Serve views over HTTP until Ctrl-C, a signal, or the end of a parent process."""
    page = Page(views, host, port, token)
    hint = f"; its token is in {os.path.join(keys, TOKEN)}" if token else ""
    print(f"kvtop: the page is at {page.url}{hint}", flush=True)
    page.run(until=lambda: parent not in (None, os.getppid()))
    return 0


def render_view(view: JobView) -> Any:
    """Return a view as a rich renderable."""
    from rich.console import Group

    parts: list[Any] = [_servers_table(view.servers)]
    for job in view.jobs:
        parts.append(_workers_table(job))
        if job.last is not None:
            parts.append(f"rank {job.last.rank} is {job.last.behind} rounds behind the first")
        parts += [
            _plain_terminal_text(
                f"waits {one.seconds:.1f} s: {one.what}, for {_format_ranks(one.missing)}", "yellow"
            )
            for one in job.waits
            if one.seconds >= BRIEF
        ]
        parts += [_plain_terminal_text(f"failed: {text}", "red") for text in job.errors[-3:]]
    if not any([one.is_there for one in view.servers]):
        parts.append("no server answers: has the job ended, or are these addresses of another one?")
    elif not view.jobs:
        parts.append("no job is on these servers now")
    return Group(*parts)


def _plain_terminal_text(text: str, style: str = "") -> Any:
    """Return untrusted text without markup and without control characters."""
    from rich.text import Text

    return Text("".join([one if one.isprintable() else "?" for one in text]), style)


def _servers_table(servers: Sequence[ServerStatus]) -> Any:
    from rich.table import Table

    heads = ("server", "address", "memory", "of", "in /s", "out /s", "CPU", "queued", "")
    table = Table(*heads, title="servers", title_justify="left", box=None, padding=(0, 1))
    for index, one in enumerate(servers):
        if not one.is_there:
            table.add_row(str(index), one.address, "", "", "", "", "", "", "[red]no answer[/]")
            continue
        limit = _format_bytes(one.max_memory) if one.max_memory else "any"
        flows = _format_bytes(one.bytes_in), _format_bytes(one.bytes_out), f"{one.cpu:.0%}"
        queued = _format_bytes(one.queued) if one.queued else ""
        table.add_row(str(index), one.address, _format_bytes(one.memory), limit, *flows, queued, one.notes)
    return table


def _workers_table(job: WatchedJob) -> Any:
    from rich.table import Table

    age = _format_duration(job.age)
    title = f"{job.name}: {job.mode}, step {job.step}, {job.rounds:.1f} rounds/s, {age}, {job.keys} keys"
    slowest = job.slowest
    if slowest is not None and slowest.late >= 0.05:
        title += f"; waits for rank {slowest.rank} {slowest.late:.0%} of the time"
    heads = ("rank", "where", "state", "steps/s", "samples/s", "works", "waits", "late", "loss", "last sign")
    tight: Any = {"box": None, "padding": (0, 1), "collapse_padding": True, "pad_edge": False}
    table = Table(title=_plain_terminal_text(title, "italic"), title_justify="left", **tight)
    # On a narrow terminal the addresses are shortened.
    for head in heads:
        table.add_column(head, no_wrap=head != "where", overflow="ellipsis")
    for one in job.workers:
        table.add_row(*_worker_cells(one), style="bold red" if one.state == "failed" else None)
    return table


def _worker_cells(one: WatchedWorker) -> list[Any]:
    state = one.state if one.round < 0 else f"{one.state}, round {one.round}"
    silent = "red" if one.silence >= SILENT else ""
    color = "red" if one.late >= 0.25 else "yellow" if one.late >= 0.05 else "green"
    left_out = f", left out of {one.left_out}" if one.left_out else ""
    return [
        str(one.rank),
        _plain_terminal_text(one.address),
        f"{state}, done" if one.is_done else state,
        f"{one.steps:.1f}",
        f"{one.samples:.0f}" if one.samples else "",
        f"{one.works:.0%}",
        f"{one.waits:.0%}",
        f"[{color}]{one.late:.0%}{left_out}[/]",
        "" if one.loss is None else f"{one.loss:.4g}",
        _plain_terminal_text(one.why)
        if one.silence < 0
        else _plain_terminal_text(f"{one.silence:.1f} s", silent),
    ]


def _format_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {', '.join(map(str, ranks[:8]))}{more}" if ranks else "a decision"


def _format_duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _format_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return ""


def _make_top_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtop",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "servers",
        nargs="*",
        metavar="SERVER",
        help=f"tcp://HOST:PORT, a list with commas, or @FILE [{SERVERS}]",
    )
    # Without one of these flags the view in the terminal is live.
    add("--once", action="store_true", help="print one view and exit")
    add("--json", action="store_true", help="print one view as JSON and exit")
    add(
        "--http", type=_parse_http_address, metavar="HOST:PORT",
        help="serve a page for browsers, and /metrics for Prometheus, until Ctrl-C; port 0 takes a free one",
    )  # fmt: skip
    # The variable allows it once for a whole job, as for servers.
    add(
        "--allow-unauthenticated-bind", action="store_true",
        default=os.environ.get("KVSTORE_ALLOW_UNAUTHENTICATED_BIND", "") == "1",
        help="let --http listen on an address that other hosts can reach, which shows them the job "
        "[KVSTORE_ALLOW_UNAUTHENTICATED_BIND=1]",
    )  # fmt: skip
    add(
        "--allow-public-bind", action=RemovedFlag, nargs=0,
        const="set KVSTORE_KEYS=DIR, so that the page asks for a token, or give --allow-unauthenticated-bind",
        help=argparse.SUPPRESS,
    )  # fmt: skip
    add(
        "--interval",
        type=_parse_top_interval,
        default=1.0,
        metavar="SEC",
        help="seconds between two queries (%(default)g)",
    )
    # Checked after each view, so this process may outlive its parent by an interval.
    add(
        "--with-parent", type=int, metavar="PID",
        help="end when the process that started this one, of that number, has ended; for programs that show themselves",
    )  # fmt: skip
    add("--version", action="version", version=__version__)
    return parser


def _parse_http_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def _parse_top_interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


# ---------------------------------------------------------------- served to browsers and Prometheus

HISTORY = 300
"""Number of views that are kept for browsers that open the page later."""


JOB = "kvjob"
"""The label with a job's name. Prometheus uses `job` itself, and would rename ours to exported_job."""


class Page:
    """Serves views of a job over HTTP.

    Args:
        views: Yields a view whenever one is due. Consumed by `run`.
        host, port: Where to listen. Port 0 lets the system choose.
        token: Whoever asks for what is known of the job has to send it ("Authorization: Bearer …"); empty: nobody has.

    Raises:
        ConfigurationError: The address is in use, or does not belong to this machine.
    """

    def __init__(self, views: Iterator[JobView], host: str, port: int, token: str = "") -> None:
        self._token = token
        self._views = views
        self._host = host
        self._seen: deque[JobView] = deque(maxlen=HISTORY)
        self.problem = ""
        """Why there are no more views."""
        # 1. The request handler, which only delegates to `answer`.
        page = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def do_GET(self, has_body: bool = True) -> None:
                status, kind, body = page.answer(
                    self.path,
                    self.headers.get("Host", ""),
                    self.headers.get("Authorization", ""),
                    self.headers.get("Origin", ""),
                )
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Content-Security-Policy", _POLICY)
                if status == 401:
                    self.send_header("WWW-Authenticate", "Bearer")
                self.end_headers()
                if has_body:
                    self.wfile.write(body)

            def do_HEAD(self) -> None:
                self.do_GET(has_body=False)

            def log_message(self, *_: Any) -> None:
                """Log nothing: a request each second would fill the terminal."""

        # 2. The server, for IPv4 or IPv6.
        family = ThreadingHTTPServer.address_family
        try:
            is_six = ipaddress.ip_address(host).version == 6
        except ValueError:
            is_six = False
        kind = type("Served", (ThreadingHTTPServer,), {"address_family": 10 if is_six else family})
        # 3. Listen.
        try:
            self._server: ThreadingHTTPServer = kind((host, port), Handler)
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve the page at {host}:{port}: {error.strerror}; is another program there? Port 0 takes "
                "a free one"
            ) from None
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}/"

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until views end or `until` returns True after one. Blocks. Raises KVStoreError if querying fails."""
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()
        try:
            for view in self._views:
                self._seen.append(view)
                if until():
                    break
        except KVStoreError as error:
            self.problem = str(error)
            raise
        finally:
            self._server.shutdown()
            self._server.server_close()

    def answer(
        self, path: str, host: str, authorization: str = "", origin: str = ""
    ) -> tuple[int, str, bytes]:
        """Return status, content type and body for a request; the others are its headers."""
        if origin and origin not in (f"http://{host}", f"https://{host}"):
            return 403, _TEXT, b"pages of other sites may not ask\n"
        if not _may_ask_page(host, self._host):
            return (
                403,
                _TEXT,
                b"this page is served under an address, localhost, or the host that was given\n",
            )
        path = path.partition("?")[0]
        if path == "/":
            return 200, _HTML, resources.files(__package__).joinpath("page.html").read_bytes()
        if path in ("/view.json", "/metrics") and not self._may_see(authorization):
            return 401, _TEXT, b"this needs the token of the page, as Authorization: Bearer TOKEN\n"
        if path == "/view.json":
            return 200, _JSON, json.dumps([job_view_as_values(view) for view in list(self._seen)]).encode()
        if path == "/metrics":
            if not self._seen:
                return 503, _TEXT, b"nothing was seen yet\n"
            try:
                return 200, _METRICS, format_metrics(self._seen[-1])
            except ImportError as error:
                return 501, _TEXT, f"{error}; pip install 'kvtrainer[watch]' brings it\n".encode()
        if path == "/healthz":
            problem = self._illness()
            return (503, _TEXT, f"{problem}\n".encode()) if problem else (200, _TEXT, b"ok\n")
        return 404, _TEXT, b"there are /, /view.json, /metrics and /healthz\n"

    def _may_see(self, authorization: str) -> bool:
        wanted = f"Bearer {self._token}"
        return not self._token or hmac.compare_digest(authorization.encode(), wanted.encode())

    def _illness(self) -> str:
        """Return why nothing can be shown, or an empty string."""
        if self.problem or not self._seen:
            return self.problem or "nothing was seen yet"
        return "" if any([one.is_there for one in self._seen[-1].servers]) else "no server answers"


_TEXT, _HTML, _JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def _may_ask_page(host: str, bound: str) -> bool:
    """Return whether a request with this Host header may be answered."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("localhost", bound.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def format_metrics(view: JobView) -> bytes:
    """Return a view in Prometheus's text format. Raises ImportError without prometheus_client."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_PrometheusFamilies(view))
    return bytes(generate_latest(registry))


class _PrometheusFamilies:
    """A view as a collector of prometheus_client, with Prometheus's naming conventions."""

    def __init__(self, view: JobView) -> None:
        self._view = view

    def collect(self) -> Iterator[Any]:
        """Yield one metric family for each quantity."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        jobs = self._view.jobs
        servers = [([one.address], one) for one in self._view.servers]
        workers = [([job.name, str(one.rank)], one) for job in jobs for one in job.workers]
        kinds: Sequence[tuple[str, list[str], Sequence[tuple[list[str], Any]], Sequence[Metric]]] = (
            ("server", ["server"], servers, _OF_SERVERS),
            ("job", [JOB], [([job.name], job) for job in jobs], _OF_JOBS),
            ("worker", [JOB, "rank"], workers, _OF_WORKERS),
        )
        for kind, labels, rows, metrics_of in kinds:
            for name, attribute, text in metrics_of:
                is_counter = name.endswith("_total")
                family_of = CounterMetricFamily if is_counter else GaugeMetricFamily
                family = family_of(f"kvstore_{kind}_{name}", text, labels=labels)
                for values, one in rows:
                    if isinstance(one, ServerStatus) and not one.is_there and attribute != "is_there":
                        # Zeros would look like a restart of the server.
                        continue
                    if (number := getattr(one, attribute)) is not None:
                        family.add_metric(values, float(number))
                yield family
        yield from self._traffic()
        yield self._round_times()

    def _traffic(self) -> Iterator[Any]:
        """Yield bytes for each server and job."""
        from prometheus_client.core import CounterMetricFamily

        for name, attribute, text in _TRAFFIC:
            family = CounterMetricFamily(f"kvstore_server_{name}", text, labels=["server", JOB])
            for server in self._view.servers:
                by_job = getattr(server, attribute)
                for job in self._view.jobs:
                    if job.name in by_job:
                        family.add_metric([server.address, job.name], float(by_job[job.name]))
            yield family

    def _round_times(self) -> Any:
        from prometheus_client.core import HistogramMetricFamily

        text = "Seconds from the end of one round of a table to the end of its next"
        family = HistogramMetricFamily("kvstore_job_round_duration_seconds", text, labels=[JOB])
        for job in self._view.jobs:
            times = job.round_times
            bounds = [*map(str, times.bounds), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(times.counts), strict=True))
            family.add_metric([job.name], buckets, sum_value=times.total)
        return family


Metric = tuple[str, str, str]
"""Metric name without its prefix, attribute with its value, and description."""
_OF_SERVERS: Sequence[Metric] = (
    ("up", "is_there", "1: the server has answered"),
    ("memory_bytes", "memory", "Bytes that are promised to jobs, and shared with workers of the host"),
    ("memory_limit_bytes", "max_memory", "The limit of that; 0: none"),
    ("queued_bytes", "queued", "Bytes of answers that wait for workers which are slow to read"),
    (
        "refused_total",
        "refused",
        "Connections and messages that were refused, or ended before they had a session",
    ),
    ("cpu_seconds_total", "cpu_seconds", "CPU time that the server has used"),
    ("uptime_seconds", "uptime", "Seconds since the server started"),
)
_TRAFFIC: Sequence[Metric] = (
    ("received_bytes_total", "received", "Bytes of gradients and weights that workers have sent"),
    ("sent_bytes_total", "sent", "Bytes of weights that were sent, without those that workers map"),
)
_OF_JOBS: Sequence[Metric] = (
    (
        "rounds_total",
        "rounds_total",
        "Rounds that have ended; each contribution, where rounds are not all ranks'",
    ),
    ("updates_total", "updates", "Updates of the weights"),
    ("workers", "num_workers", "How many ranks the job has"),
    ("uptime_seconds", "age", "Seconds since the first worker of the job connected"),
    ("longest_wait_seconds", "longest_wait_seconds", "How long the oldest wait lasts already"),
)
_OF_WORKERS: Sequence[Metric] = (
    ("up", "is_here", "1: the rank takes part"),
    ("late_ratio", "late", "Share of the time in which the others waited for this rank, from 0 to 1"),
    ("left_out_total", "left_out", "Rounds that have ended without its gradient, with backup workers"),
    ("wait_ratio", "waits", "Share of the time in which it waited for servers and other workers"),
    ("compute_ratio", "works", "Share of the time between its steps: data, forward and backward"),
    ("steps_total", "steps_total", "Steps that it has made since its process started"),
    ("samples_total", "samples_total", "Examples that it has trained on, where the script tells"),
    ("loss", "loss", "The last loss that the script has told"),
    ("rounds_behind", "behind", "Rounds fewer than the first worker, where rounds are each worker's own"),
    ("silence_seconds", "silence_or_none", "Seconds since its last sign; left out where it is not there"),
)


if __name__ == "__main__":
    sys.exit(main())
