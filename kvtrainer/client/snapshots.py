"""How workers let a job go back to a snapshot: which one all servers have, and how they are told. No clock.

Every process of a worker asks the servers when it connects. If one of them has lost what it held of the job, all of
them go back to the latest snapshot that all have, those that have lost nothing, too. The rule is a function of what
the servers say (`choose_cut`), so several workers that come at the same time decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore_server.engine.snapshots import SnapshotPeriod
from kvstore_server.errors import ProtocolError, ServerLostState
from kvstore_server.protocol import messages as m


class OfferedSnapshot(NamedTuple):
    """A snapshot that a server has.

    Args:
        holders: The servers on which the job has tables.
        ordinal: How many were due up to then, this one included.
    """

    round: int
    holders: frozenset[int]
    ordinal: int = 1


_BEGINNING = OfferedSnapshot(0, frozenset())


class SnapshotOffer(NamedTuple):
    """What one server says of a job.

    Args:
        round: How far its tables are; -1 if it has none, 0 if they have no values.
        holders: The servers on which the job has tables, according to them.
        cuts: What the server can go back to.
        generation: How often it has gone back.
        restored: To which round the last time; 0 if it has not.
        period: How often it takes snapshots; never, if it has no --state-dir.
        due: How many were due since the job has begun there.
        tag, save: What the job has loaded the last time that it has gone back, if that was by hand.
    """

    round: int
    holders: frozenset[int]
    cuts: Sequence[OfferedSnapshot]
    generation: int
    restored: int
    period: SnapshotPeriod
    due: int
    tag: str = ""
    save: str = ""


def read_offer(answer: m.ReplyBody) -> SnapshotOffer:
    """Return what a server has answered. Raises ProtocolError if it cannot be that."""
    if not isinstance(answer, m.Status):
        raise ProtocolError(f"a server is asked for its snapshots, and answers {answer!r:.200}")
    values = answer.values
    try:
        cuts = [OfferedSnapshot(int(at), frozenset(map(int, own)), int(n)) for at, own, n in values["cuts"]]
        numbers = [int(values[name]) for name in ("round", "generation", "restored", "due")]
        holders, (round_, generation, restored, due) = frozenset(map(int, values["holders"])), numbers
        tag, save = str(values["tag"]), str(values["save"])
        period = SnapshotPeriod(int(values["every"]), float(values["seconds"]))
        return SnapshotOffer(round_, holders, cuts, generation, restored, period, due, tag, save)
    except (LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"a server says of its snapshots {values!r:.200}: {error!r}") from None


class SnapshotChoice(NamedTuple):
    """The snapshot to which a job goes back (round 0: its beginning), and how often it will have gone back then.

    Args:
        tag, save: What it loads, if that is what was saved by hand.
    """

    cut: OfferedSnapshot
    generation: int
    tag: str = ""
    save: str = ""


def choose_cut(offers: Sequence[SnapshotOffer]) -> SnapshotChoice | None:
    """Choose the snapshot to which a job goes back; None if no server has lost anything.

    A server that has gone back less often than others was killed before it could, or is yet to be told; it counts like
    one that has lost its state. If the others have ended no round since they went back, it follows them.

    Raises:
        ServerLostState: A server has lost what it held, and no snapshot is on all servers.
    """
    # 1. Which servers should hold something of the job, and which of them do not?
    live = [one for one in offers if one.round > 0]
    cuts = [cut for one in offers for cut in one.cuts]
    holders = [one.holders for one in live] or [cut.holders for cut in cuts]
    needed = [at for at in sorted(frozenset[int]().union(*holders)) if at < len(offers)]
    newest = max(one.generation for one in offers)
    ahead = [at for at, one in enumerate(offers) if newest and one.generation == newest]
    lost = [at for at in needed if offers[at].round < 0 or offers[at].generation < newest]
    if not lost:
        # Perhaps another worker is just telling them to begin again, and nobody has given first values since.
        begins = bool(ahead) and not needed and len(ahead) < len(offers)
        begins = begins and all(offers[at].restored == 0 and offers[at].round < 0 for at in ahead)
        return SnapshotChoice(_BEGINNING, newest) if begins else None
    latest = max(_common_cuts(offers), key=lambda cut: cut.round, default=None)
    # 2. Some servers may have gone back already, told by another worker that has yet to tell the others, or that died
    # before. They go on from there, as long as no round has ended since.
    if ahead:
        restored, tag, save = offers[ahead[0]].restored, offers[ahead[0]].tag, offers[ahead[0]].save
        reached = [offers[at].round for at in ahead if at in needed]
        if all(offers[at].restored == restored for at in ahead) and all(
            max(at, 0) == restored for at in reached
        ):
            if tag:
                return SnapshotChoice(OfferedSnapshot(restored, frozenset(needed)), newest, tag, save)
            begun = [cut for at in lost for cut in offers[at].cuts if cut.round == restored]
            has_later = not reached and latest is not None and latest.round > restored
            if (len(begun) == len(lost) or not restored) and not has_later:
                return SnapshotChoice(begun[0] if restored else _BEGINNING, newest)
    # 3. Or the latest one that all have.
    if latest is not None:
        return SnapshotChoice(latest, newest + 1)
    # 4. There is none. A job that has not reached its first snapshot begins again; the progress of a later one is not
    # thrown away without being asked.
    without = [at for at, one in enumerate(offers) if not one.period]
    if without or max([cut.ordinal for cut in cuts] + [one.due for one in live], default=0) > 1:
        why = f" (servers {', '.join(map(str, without))} take none, see --state-dir and --snapshot-every)"
        raise ServerLostState(
            f"servers {', '.join(map(str, lost))} have lost what they held of this job, and no snapshot is on all of "
            f"its servers: they have those of rounds {[sorted({cut.round for cut in one.cuts}) for one in offers]}"
            f"{why if without else ''}. "
            "Stop the servers, and start the job with an empty --state-dir, from its last saved states"
        )
    origin = next((one for one in live if one.tag), None)
    if origin is None:
        return SnapshotChoice(_BEGINNING, newest + 1)
    return SnapshotChoice(
        OfferedSnapshot(origin.restored, frozenset(needed)), newest + 1, origin.tag, origin.save
    )


def common_rounds(offers: Sequence[SnapshotOffer]) -> list[int]:
    """Return the rounds of the snapshots that all servers have on which the job has tables."""
    return sorted({cut.round for cut in _common_cuts(offers)})


def _common_cuts(offers: Sequence[SnapshotOffer]) -> list[OfferedSnapshot]:
    at_server = [{cut.round for cut in one.cuts} for one in offers]
    return [
        cut
        for one in offers
        for cut in one.cuts
        if all(at < len(offers) and cut.round in at_server[at] for at in cut.holders)
    ]
