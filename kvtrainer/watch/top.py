"""`kvtop`: a running job in a terminal, or as JSON, or served to browsers and Prometheus."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore_server.check import is_loopback
from kvstore_server.errors import ConfigurationError, KVStoreError
from kvstore_server.probe import look
from kvstore_server.version import __version__
from kvtrainer.env import SERVERS, read_servers
from kvtrainer.watch.job import SILENT, Job, Look, Server, View, Worker, as_values, view_of
from kvtrainer.watch.page import Page

BRIEF = 1.0
"""Seconds below which a wait is not worth a line: each look finds one that is part of a round."""

_DESCRIPTION = """\
Show what a running job does: workers and who is late, servers, rates, and what waits for whom.

SERVER is the address that a server has printed, as in KVSTORE_SERVERS, which counts where none is given. kvtop only
looks, and may come and go as it likes. Traffic is neither authenticated nor encrypted, like all of the job's.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return its exit code.

    Wrong usage exits with code 2 through SystemExit.
    """
    parser = _make_parser()
    options = parser.parse_args(argv)
    try:
        addresses = read_servers(os.environ, ",".join(options.servers) or None)
    except ConfigurationError as error:
        parser.exit(2, f"kvtop: {error}\n")
    if options.http is not None and not options.allow_public_bind and not is_loopback(options.http[0]):
        host = options.http[0]
        parser.exit(
            2, f"kvtop: {host} can be reached from other hosts; add --allow-public-bind if they may look\n"
        )
    if addresses is None:
        parser.exit(2, f"kvtop: no servers to look at: name them, or set {SERVERS}\n")
    views = follow(addresses, options.interval)
    try:
        if options.once or options.json:
            return _print_once(next(views), options.json)
        if options.http is not None:
            return _serve(views, options.with_parent, *options.http)
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


def follow(
    addresses: Sequence[str],
    interval: float,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[View]:
    """Look at servers again and again; yield a view each time, the first after one interval (seconds)."""
    before = Look(clock(), look(addresses, interval))
    while True:
        pause(min(interval, max(0.0, before.at + interval - clock())))  # the clock may be set back meanwhile
        now = Look(clock(), look(addresses, interval))
        yield view_of(before, now, addresses)
        before = now


def _print_once(view: View, as_json: bool) -> int:
    """Print one view; the exit code is 1 if no server has answered."""
    if as_json:
        print(json.dumps(as_values(view)))
    else:
        from rich.console import Console

        Console().print(render(view))
    return 0 if any(server.is_there for server in view.servers) else 1


def _show_live(views: Iterator[View]) -> int:
    """Show views in the terminal until Ctrl-C."""
    from rich.live import Live

    with Live(refresh_per_second=4, screen=sys.stdout.isatty()) as live:
        for view in views:
            live.update(render(view), refresh=True)
    return 0


def _serve(views: Iterator[View], parent: int | None, host: str, port: int) -> int:
    """Serve views over HTTP until Ctrl-C, or a signal, or the end of the parent process where one is named."""
    page = Page(views, host, port)
    print(f"kvtop: the page is at {page.url}", flush=True)
    page.run(until=lambda: parent not in (None, os.getppid()))
    return 0


def render(view: View) -> Any:
    """Lay a view out for rich."""
    from rich.console import Group

    parts: list[Any] = [_servers_table(view.servers)]
    for job in view.jobs:
        parts.append(_workers_table(job))
        if job.last is not None:
            parts.append(f"rank {job.last.rank} is {job.last.behind} rounds behind the first")
        parts += [
            _plain(f"waits {one.seconds:.1f} s: {one.what}, for {_ranks(one.missing)}", "yellow")
            for one in job.waits
            if one.seconds >= BRIEF
        ]
        parts += [_plain(f"failed: {text}", "red") for text in job.errors[-3:]]
    if not any([one.is_there for one in view.servers]):
        parts.append("no server answers: has the job ended, or are these addresses of another one?")
    elif not view.jobs:
        parts.append("no job is on these servers now")
    return Group(*parts)


def _plain(text: str, style: str = "") -> Any:
    """Text as it was told, which may be anybody's: no markup, and nothing that a terminal would obey."""
    from rich.text import Text

    return Text("".join([one if one.isprintable() else "?" for one in text]), style)


def _servers_table(servers: Sequence[Server]) -> Any:
    from rich.table import Table

    heads = ("server", "address", "memory", "of", "in /s", "out /s", "")
    table = Table(*heads, title="servers", title_justify="left", box=None, padding=(0, 1))
    for index, one in enumerate(servers):
        if not one.is_there:
            table.add_row(str(index), one.address, "", "", "", "", "[red]no answer[/]")
            continue
        limit = _bytes(one.max_memory) if one.max_memory else "any"
        flows = _bytes(one.bytes_in), _bytes(one.bytes_out)
        state = "stopping" if one.is_stopping else ""
        table.add_row(str(index), one.address, _bytes(one.memory), limit, *flows, state)
    return table


def _workers_table(job: Job) -> Any:
    from rich.table import Table

    title = f"{job.name}: {job.mode}, {job.rounds:.1f} rounds/s, {job.updates} updates, {job.keys} keys"
    slowest = job.slowest
    if slowest is not None and slowest.late >= 0.05:
        title += f"; waits for rank {slowest.rank} {slowest.late:.0%} of the time"
    heads = ("rank", "where", "state", "steps/s", "samples/s", "works", "waits", "late", "loss", "last sign")
    tight: Any = {"box": None, "padding": (0, 1), "collapse_padding": True, "pad_edge": False}
    table = Table(title=_plain(title, "italic"), title_justify="left", **tight)
    for head in heads:  # where a terminal is narrow, the hosts' names give way
        table.add_column(head, no_wrap=head != "where", overflow="ellipsis")
    for one in job.workers:
        table.add_row(*_cells(one), style="bold red" if one.state == "failed" else None)
    return table


def _cells(one: Worker) -> list[Any]:
    state = one.state if one.round < 0 else f"{one.state}, round {one.round}"
    silent = "red" if one.silence >= SILENT else ""
    color = "red" if one.late >= 0.25 else "yellow" if one.late >= 0.05 else "green"
    return [
        str(one.rank),
        _plain(one.address),
        f"{state}, done" if one.is_done else state,
        f"{one.steps:.1f}",
        f"{one.samples:.0f}" if one.samples else "",
        f"{one.works:.0%}",
        f"{one.waits:.0%}",
        f"[{color}]{one.late:.0%}[/]",
        "" if one.loss is None else f"{one.loss:.4g}",
        _plain(one.why) if one.silence < 0 else _plain(f"{one.silence:.1f} s", silent),
    ]


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {', '.join(map(str, ranks[:8]))}{more}" if ranks else "a decision"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return ""


def _make_parser() -> argparse.ArgumentParser:
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
    add("--once", action="store_true", help="print one view and end")
    add("--json", action="store_true", help="print one view as JSON and end")
    add(
        "--http", type=_address, metavar="HOST:PORT",
        help="serve a page for browsers, and /metrics for Prometheus, until Ctrl-C; port 0 takes a free one",
    )  # fmt: skip
    add(
        "--allow-public-bind", action="store_true", default=os.environ.get("KVSTORE_ALLOW_PUBLIC_BIND", "") == "1",
        help="let --http listen on an address that other hosts can reach, which shows them the job "
        "[KVSTORE_ALLOW_PUBLIC_BIND=1]",
    )  # fmt: skip
    add(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SEC",
        help="seconds between two looks (%(default)g)",
    )
    add(
        "--with-parent", type=int, metavar="PID",
        help="end when the process that started this one, of that number, has ended; for programs that show themselves",
    )  # fmt: skip
    add("--version", action="version", version=__version__)
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
