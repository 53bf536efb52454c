"""A round under way on this worker, over all servers.

`Round` knows which servers have yet to answer, and keeps errors, vetoes, decisions and keys that no worker has. Each
server's share is a `ServerRequest`. `Rounds` drives both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from kvstore_server.engine.views import MemberView
from kvstore_server.errors import KVStoreError
from kvstore_server.failpoints import failpoint
from kvstore_server.protocol import messages as m
from kvstore_server.shard.norms import Decision, Measured
from kvtrainer.client.contribution import Contribution, EncodedSlice
from kvtrainer.client.server_request import ServerRequest
from kvtrainer.client.session import Session
from kvtrainer.client.tables import RemoteTable, Tables


class Round:
    def __init__(self, contribution: Contribution, session: Session, is_read: bool = False) -> None:
        self.contribution = contribution
        self.session = session
        self.started = session.clock()
        self.is_read = is_read
        """Whether weights are only read."""
        self.as_of_round = -1
        """For a read of the weights with which a round began: its number; -1: of the present weights."""
        self.repeats_commit = False
        """Whether a commit of an earlier process is repeated for its answer. Then nothing is given, and like for a read
        nothing is aborted."""
        self.is_lost = False
        """Whether a server does not have that commit any more."""
        self.is_for_training = True
        """Whether this worker computes with the weights that come; False if they are only inspected, or prefetched."""
        self.server_requests: list[ServerRequest] = []
        self.open: list[ServerRequest] = []
        """The requests that are not answered yet."""
        self.error: KVStoreError | None = None
        self.absent: dict[str, set[int]] = {}
        """Table → keys that no worker contributed to."""
        self.in_force: dict[str, m.EffectiveOptions] = {}
        """Table → the options that hold, for a worker that has joined."""
        self.vetoes: dict[str, tuple[int, ...]] = {}
        """Table → the ranks whose veto kept its round from being applied; empty if that was decided by its sum."""
        self.decided: dict[str, tuple[Measured | None, Decision]] = {}
        """Table → the measures of its sum, and the decision about it."""
        self.encoded: dict[int, dict[int, EncodedSlice]] = {}
        """Table (index) → its slices that are encoded."""
        self.valid: frozenset[int] | None = None
        """The slices (by index) of the only table whose eager push counts; None if there was no eager push."""
        self.aborted: set[str] = set()
        """Tables whose round was given up as soon as one server had failed it."""
        self.next_views: dict[str, MemberView] = {}
        """Table → the members of its next round, if these may change."""
        self.coordinator = -1
        """The server that has to tell them; -1 if the members never change, or weights are only read."""
        # With backup workers.
        self.follows = False
        """Whether it only asks for the weights after a round, see `Rounds.follow`."""
        self.needs_closing = False
        """Whether the coordinator has yet to tell with which ranks it closes the round."""
        self.closed: MemberView | None = None
        """With which ranks the coordinator has closed the round; this one is among them."""
        self.left_out: dict[int, m.LeftOut] = {}
        """Server → what it says of rounds that have ended without this rank."""
        self.asked = -1
        """The round of which servers were asked how it has ended, after this rank was left out of one."""
        self.is_over = False
        self.rows: dict[tuple[int, int], list[Tensor | None]] = {}
        """(position of the table, first key of a slice) → ids of its rows that came, by server; None for a whole slice.
        Only where workers keep what they have."""

    def __repr__(self) -> str:
        names = [table.name for table in self.contribution.tables]
        shown = f"{names[:3]!r:.200}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        rounds = sorted({int(one) for request in self.server_requests for one in request.rounds})
        number = "?" if not rounds else str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]}..{rounds[-1]}"
        awaited = ", ".join([f"server {request.server} (request {request.number})" for request in self.open])
        state = "over" if self.is_over else f"awaits {awaited}" if awaited else "all answers are here"
        error = "" if self.error is None else f", failed with {type(self.error).__name__}"
        return f"<{'Read' if self.is_read else 'Round'} {number} of tables {shown}: {state}{error}>"

    def log(self, state: str, error: BaseException | None = None) -> None:
        """If debug lines are shown, log a change of the round's state, its tables and who has not answered."""
        log = self.session.log
        if log is None:
            return
        # All servers have the same tables: those of one are enough to log.
        server_requests = [
            request for request in self.server_requests if request.server == self.server_requests[0].server
        ]
        state = {"started": "reading", "applied": "read"}.get(state, state) if self.is_read else state
        log.round(
            state,
            self.session.options.namespace,
            [
                number
                for request in server_requests
                for number in request.layout.commits[:, m.COMMIT_TABLE].tolist()
            ],
            [number for request in server_requests for number in request.rounds.tolist()],
            [table.name for table in self.contribution.tables],
            self.session.options.rank,
            [f"server:{server}" for server in sorted({request.server for request in self.open})],
            error,
        )

    def written(self) -> dict[tuple[int, int], Tensor | None]:
        found: dict[tuple[int, int], Tensor | None] = {}
        for key, all_ids in self.rows.items():
            some = [ids for ids in all_ids if ids is not None]
            found[key] = torch.cat(some) if len(some) == len(all_ids) else None
        return found

    def server_requests_of(self, table: RemoteTable) -> Iterator[tuple[ServerRequest, int]]:
        for request in self.server_requests:
            at = request.layout.position.get(table.numbers.get(request.server, -1))
            if at is not None:
                yield request, at

    def describe_end(self) -> str:
        tables = sorted({request.layout.tables[at].name for request in self.open for at in request.open})
        return f"finish with {', '.join(map(repr, tables[:3]))}{', …' if len(tables) > 3 else ''}"

    def is_outcome_unknown(self, table: RemoteTable) -> bool:
        """Return whether a table's finished round is not known to be applied on every server."""
        return any(
            at in request.open or at in request.failed for request, at in self.server_requests_of(table)
        )

    def finish(self, request: ServerRequest, tables: Iterable[int]) -> None:
        """Record that a server has answered for some tables; they stay open if measures or members are to come."""
        guard = self.contribution.guard
        if guard is None and request.server != self.coordinator:
            request.open.difference_update(tables)
        else:
            for at in tables:
                name = request.layout.tables[at].name
                is_measured = guard is None or at in request.held or self.vetoes.get(name)
                is_told = name in self.next_views and not self.needs_closing
                if is_measured and (request.server != self.coordinator or is_told):
                    request.open.discard(at)
                elif at in request.open:
                    request.complete.add(at)
        if not request.open and request in self.open:
            self.open.remove(request)
            if self.open:
                failpoint("worker.round.answered")

    @property
    def is_late(self) -> bool:
        """Whether this rank was left out of it."""
        return self.follows or bool(self.left_out)

    def has_caught_up(self, rank: int) -> bool:
        """Return whether all servers tell of the same open round, and this rank is a member of it."""
        told = list(self.left_out.values())
        is_same = (
            len(told) == len(self.server_requests) and len({(one.round, one.applied) for one in told}) == 1
        )
        return is_same and rank in self.left_out[self.coordinator].members

    def next_asked(self) -> tuple[int, bool]:
        """Return of which round to ask next, after answers that do not agree, and whether it has failed on a server.

        If they agree, the open round was closed without this rank, too.
        """
        told = list(self.left_out.values())
        last = max([one.round for one in told])
        is_same = (
            len(told) == len(self.server_requests) and len({(one.round, one.applied) for one in told}) == 1
        )
        has_failed = any(one.round == last and one.applied < last - 1 for one in told)
        return (last, False) if is_same else (last - 1, has_failed)

    def resume(self) -> None:
        """Get ready to be waited for again after an interrupt, which may have lost messages that had just come."""
        self.open[:] = [request for request in self.open if request.open]
        for request in self.open if self.contribution.outs is not None else ():
            for at in request.open:
                request.incoming.roll_back(at)

    def write(self, request: ServerRequest, gone: Collection[int], all_tables: Tables) -> None:
        """Write one server's new weights, except for some tables (by index), and store their versions."""
        contribution, incoming, layout = self.contribution, request.incoming, request.layout
        if contribution.outs is None:
            return
        follows = layout.takes_deltas and (
            not self.is_read or self.repeats_commit
        )  # a pull may write elsewhere
        incoming.write(contribution, gone, follows, self.rows)
        came = np.array(incoming.came)
        read = came >= 0
        if gone:
            read &= ~np.isin(layout.index, list(gone))
        if self.is_for_training or not self.is_read:
            all_tables.newest[layout.server, layout.index[read]] = came[read]
        if self.is_for_training:
            all_tables.version[layout.server, layout.index[read]] = came[read]
        if contribution.is_incremental or follows:
            all_tables.held[layout.server, layout.index[read]] = came[read]
