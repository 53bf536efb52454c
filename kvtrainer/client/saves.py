"""What a job saves and loads by hand: a state of all servers after one round, under a tag.

A save is complete when every server that has tables has written its part; each part says which save it belongs to, and
on which servers the others are. Only then what was saved under the tag before is removed. So there is a complete save
at any time, whatever process is killed, and an incomplete one is never taken for one.

`choose_save` is a pure function of what the servers say, so several workers that load at the same time decide alike.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_server.errors import (
    ConfigurationError,
    DeadlineError,
    KVStoreError,
    ProtocolError,
    UnknownNameError,
    did_you_mean,
)
from kvstore_server.failpoints import failpoint
from kvstore_server.protocol import messages as m
from kvtrainer.client.session import Session
from kvtrainer.client.snapshots import read_offer

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
"""Seconds between two questions whether servers have written their parts."""


class SavedPart(NamedTuple):
    """What one server has saved, as another one that can read it says.

    Args:
        server, num_servers: Which one has saved it, out of how many.
        save: What it is a part of.
        round: After which round.
        holders: The servers that have a part.
    """

    server: int
    num_servers: int
    save: str
    round: int
    holders: frozenset[int]


class SaveOffer(NamedTuple):
    """What one server says about a tag.

    Args:
        parts: What it can read.
        tags: All tags that it has files of.
        generation: How often the job has gone back there.
        is_loaded: Whether the job's present state descends from that tag.
    """

    parts: Sequence[SavedPart]
    tags: Sequence[str]
    generation: int
    is_loaded: bool


def read_save_offer(values: Mapping[str, Any]) -> SaveOffer:
    """Return what a server has answered. Raises ProtocolError if it cannot be that."""
    try:
        parts = [
            SavedPart(int(server), int(count), str(save), int(round_), frozenset(map(int, holders)))
            for server, count, save, round_, holders in values["parts"]
        ]
        return SaveOffer(
            parts, list(map(str, values["tags"])), int(values["generation"]), bool(values["is_loaded"])
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"a server says of what is saved {values!r:.200}: {error!r}") from error


class ChosenSave(NamedTuple):
    save: str
    round: int
    holders: frozenset[int]
    """The servers that need a part of their own; all, if another number of servers has saved it."""


def choose_save(tag: str, offers: Sequence[SaveOffer]) -> ChosenSave:
    """Return the latest save of a tag that all servers can load.

    A server needs its own part, or all parts if there are others than as many servers.

    Raises:
        UnknownNameError: Nothing was saved under the tag.
        ConfigurationError: A part is missing.
    """
    missing: list[str] = []
    for save in sorted({part.save for offer in offers for part in offer.parts}, reverse=True):
        seen = [{part.server: part for part in offer.parts if part.save == save} for offer in offers]
        first = next(part for own in seen for part in own.values())
        if any(part[1:] != first[1:] for own in seen for part in own.values()):
            missing.append(f"its parts contradict each other: {[sorted(own.values()) for own in seen]}")
            continue
        is_spread = first.num_servers != len(offers)
        lacking = {
            at: sorted(first.holders.intersection(first.holders if is_spread else [at]).difference(own))
            for at, own in enumerate(seen)
        }
        lacking = {at: servers for at, servers in lacking.items() if servers}
        if not lacking:
            return ChosenSave(
                save, first.round, frozenset(range(len(offers))) if is_spread else first.holders
            )
        missing += [
            f"server {at} of {len(offers)} does not find what servers {servers} of {first.num_servers} have saved "
            f"after round {first.round}"
            for at, servers in lacking.items()
        ]
    if not missing:
        known = sorted({one for offer in offers for one in offer.tags})
        raise UnknownNameError(
            f"nothing was saved as {tag!r}; in the servers' --state-dir there is {', '.join(known) or 'nothing'}"
            f"{did_you_mean(tag, known)}"
        )
    raise ConfigurationError(
        f"{tag!r} cannot be loaded: {'; '.join(missing)}. It was not saved completely; or let each server read the "
        "directories server-0, server-1, … of all servers that have saved it in its --state-dir"
    )


def save(session: Session, tag: str, round_: int, sleep: Callable[[float], object] = time.sleep) -> None:
    """Save the state of a job after a round, which must not go on meanwhile; blocks until it is on all disks.

    Raises:
        ConfigurationError: A server has no directory for it, or the job cannot be saved.
        RecoveryError: A server could not write its part.
        DeadlineError: It has taken longer than the session's timeout.
    """
    # 1. A save that sorts behind all earlier ones of the tag.
    serial = 1 + max(
        [int(part.save[:8], 16) for offer in _find_save_offers(session, tag) for part in offer.parts],
        default=0,
    )
    name = f"{serial:08x}{secrets.token_hex(8)}"
    body = m.Snapshot("save", round_, tag=tag, save=name)
    servers, deadline, pause = (
        range(session.num_servers),
        session.clock() + session.options.timeout,
        _FIRST_PAUSE,
    )
    # 2. Every server copies its part at once, and writes it beside what else it does.
    try:
        open_ = list(servers)
        while open_:
            answers = session.call_all([(server, body) for server in open_])
            failpoint("worker.save.asked")
            open_ = [
                at
                for at, one in zip(open_, answers, strict=True)
                if not _save_answer_values(one).get("is_saved")
            ]
            if open_ and session.clock() >= deadline:
                raise DeadlineError(
                    f"servers {open_} have not written {tag!r} within {session.options.timeout:g} s; are their disks "
                    "slow? (timeout=… of the kvstore or KVSTORE_TIMEOUT raises the limit)"
                )
            if open_:
                sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
    except KVStoreError:
        drop = m.Snapshot("drop", round_, tag=tag, save=name)
        session.ask_all([(server, drop) for server in servers], session.options.dead_after)
        raise
    failpoint("worker.save.written")
    # 3. It is complete: earlier ones of the tag are not needed any more.
    for server in servers:
        session.call(server, m.Snapshot("keep", round_, tag=tag, save=name))
        failpoint("worker.save.next_kept")


def load(session: Session, tag: str) -> None:
    """Let all servers go back to what was saved under a tag, unless the job has done so already; blocks.

    Raises:
        UnknownNameError, ConfigurationError: As `choose_save`.
        RecoveryError: What was saved is damaged; nothing has changed then.
    """
    offers = _find_save_offers(session, tag)
    if any(offer.is_loaded for offer in offers):
        _log.info("this job has loaded %r before, and goes on from where it is", tag)
        _tell_others_to_load(session, tag, offers)
        return
    chosen = choose_save(tag, offers)
    # All of it is read before anything is given up.
    timeout = session.options.connect_timeout + session.options.timeout
    body = m.Snapshot("check", chosen.round, 0, False, tag, chosen.save)
    checks = [(at, _request_of_saved_part(body, at in chosen.holders)) for at in range(session.num_servers)]
    session.call_all(checks, timeout)
    generation = 1 + max(offer.generation for offer in offers)
    session.go_back(chosen.round, generation, chosen.holders, tag, chosen.save)


def _tell_others_to_load(session: Session, tag: str, offers: Sequence[SaveOffer]) -> None:
    """If another worker is just telling the servers to load a tag, tell those that it has yet to tell.

    Otherwise they would give up what this worker has begun there meanwhile.
    """
    newest = max(offer.generation for offer in offers)
    first = next(at for at, offer in enumerate(offers) if offer.generation == newest)
    state = read_offer(session.call(first, m.Snapshot("list")))
    if state.tag == tag and any(offer.generation < newest for offer in offers):
        holders = choose_save(tag, offers).holders
        session.go_back(state.restored, state.generation, holders, tag, state.save)


def _request_of_saved_part(body: m.Snapshot, has_tables: bool) -> m.Snapshot:
    return m.Snapshot(body.action, body.round, body.generation, has_tables, body.tag, body.save)


def _find_save_offers(session: Session, tag: str) -> list[SaveOffer]:
    found = session.call_all([(at, m.Snapshot("find", tag=tag)) for at in range(session.num_servers)])
    return [read_save_offer(_save_answer_values(one)) for one in found]


def _save_answer_values(answer: m.ReplyBody) -> Mapping[str, Any]:
    if not isinstance(answer, m.Status):
        raise ProtocolError(f"a server answers a question about snapshots by {type(answer).__name__}")
    return answer.values
