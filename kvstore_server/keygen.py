"""`kvstore-server keygen DIR`: makes the keys of a server and of its clients. Needs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from kvstore_server.errors import ConfigurationError
from kvstore_server.keys import (
    CLIENTS,
    LIMITS,
    SERVER_PUBLIC,
    SERVER_SECRET,
    KeyHolder,
    Role,
    make_keys,
    make_limits,
    parse_date,
    rotate_server_key,
)

_DEFAULT = ("worker:worker", "observer:observer", "admin:admin")
_MAX_RANKS = 1 << 16
_DESCRIPTION = f"""\
Make the keys of a server and of its clients in DIR. What is there already stays.

Hosts of servers need {SERVER_SECRET}, {SERVER_PUBLIC} and {CLIENTS}; a host of clients needs {SERVER_PUBLIC} and the
NAME.secret of each client that runs there. Then set KVSTORE_KEYS=DIR for all of them, or give servers --keys DIR.

A CLIENT is NAME[:ROLE[:NAMESPACES[:RANKS]]]: ROLE is worker (the default), observer or admin; NAMESPACES are patterns
of jobs that a worker may take part in, with commas between them (*); RANKS are those that it may have, like 0-3,7
(any).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code. Wrong usage raises SystemExit with code 2."""
    parser = build_keygen_parser()
    options = parser.parse_args(argv)
    directory = Path(options.directory)
    try:
        if options.rotate:
            is_first = rotate_server_key(directory)
            print(
                f"{directory / SERVER_PUBLIC} has the present and the next public key; copy it to all clients, and "
                "call this again"
                if is_first
                else f"{directory / SERVER_SECRET} has the next key; start the servers again, one after the other"
            )
            return 0
        try:
            limits = make_limits({name: float(number) for name, _, number in map(_split, options.limits)})
        except ValueError as error:
            parser.error(f"--limit: {error}")
        clients = options.clients or list(map(_parse_client, _DEFAULT))
        made = make_keys(directory, [replace(one, limits=limits, expires=options.expires) for one in clients])
    except ConfigurationError as error:
        print(f"kvstore-server keygen: {error}", file=sys.stderr)
        return 1
    print(f"{directory} has new keys of {', '.join(made)}" if made else f"{directory} has these keys already")
    return 0


def build_keygen_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    parser = argparse.ArgumentParser(
        prog="kvstore-server keygen",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument(
        "--client",
        dest="clients",
        action="append",
        type=_parse_client,
        metavar="CLIENT",
        help="make a key for this client; may be repeated; by default worker, observer and admin",
    )
    parser.add_argument(
        "--limit",
        dest="limits",
        action="append",
        default=[],
        metavar="WHAT=NUMBER",
        help="let each of the clients that are made now use no more than this of a server; may be repeated; WHAT is "
        f"{', '.join(LIMITS[:-1])} or {LIMITS[-1]}",
    )
    parser.add_argument(
        "--expires",
        type=_parse_day,
        metavar="YYYY-MM-DD",
        help="the first day, in UTC, on which the keys that are made now are not known any more",
    )
    # Not for clients: the key of the server itself.
    parser.add_argument(
        "--rotate",
        action="store_true",
        help=f"replace the server's key in two steps: the first call adds the next public key to {SERVER_PUBLIC}, "
        "which you then copy to all clients; the second one lets servers use it, when they are started again",
    )
    return parser


def _parse_client(text: str) -> KeyHolder:
    name, role, namespaces, ranks = [*text.split(":", 3), "", "", ""][:4]
    try:
        numbers = frozenset[int]().union(*map(_parse_ranks, ranks.split(","))) if ranks else None
        patterns = tuple(filter(None, namespaces.split(","))) or ("*",)
        return KeyHolder(name, b"", Role(role or "worker"), patterns, numbers)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not NAME[:ROLE[:NAMESPACES[:RANKS]]], with worker, observer or admin as ROLE and ranks "
            "like 0-3,7"
        ) from None


def _parse_day(text: str) -> date:
    try:
        return parse_date(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _split(limit: str) -> tuple[str, str, str]:
    return limit.partition("=")


def _parse_ranks(text: str) -> range:
    first, dash, last = text.partition("-")
    found = range(int(first), int(last if dash else first) + 1)
    if not found or not 0 <= found[0] <= found[-1] < _MAX_RANKS:
        raise ValueError(text)
    return found
