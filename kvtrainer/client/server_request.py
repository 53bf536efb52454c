"""A round under way, server by server: what one worker sends, what it knows, and new weights as they come.

What goes to one server, and has come from it, is a `ServerRequest`. New weights are kept until the round is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import Codec, torch_dtype
from kvstore_server.errors import KVStoreError, ProtocolError
from kvstore_server.optimizer.rows import put_rows
from kvstore_server.plan import LONG, Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE, SENT_ALONE
from kvstore_server.protocol.rows import RowSet, cut_rows, decode_rows
from kvstore_server.shard.deltas import add_changes
from kvstore_server.shard.norms import Decision, Measured
from kvtrainer.client.contribution import Arenas, Contribution, EncodedSlice, GatheredSlices, ServerLayout
from kvtrainer.client.flow_control import cut
from kvtrainer.client.session import Session
from kvtrainer.client.shared_weights import MappedWeights, SeenWeights
from kvtrainer.client.tables import RemoteTable, Tables

NO_COMMITS = m.matrix((), m.COMMIT_WORDS)
_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")
_NEAR = 1 << 20
"""Up to so many bytes go with their commit where memory is shared: to copy them costs less than a message. Not if other
servers get commits, too: between the first and the last of those there should be little to do."""


class ServerRequest:
    """A round's part on one server, by position of table and slice in the layout."""

    def __init__(self, layout: ServerLayout, round_: Round, all_tables: Tables) -> None:
        contribution = round_.contribution
        self.layout = layout
        self.server = layout.server
        self.number = 0
        """Of the request."""
        self.memory = layout.spare or GatheredSlices(layout)
        layout.spare = None
        self.given: list[int] = [] if contribution.values is None else layout.resident
        """The slices that this rank gives."""
        self.kept: frozenset[int] = frozenset()
        """Those of them that were sent ahead, and have not changed since."""
        self.generation = 0
        """Of the others."""
        self.is_announced = False
        """New weights may come before all slices are sent, so they must not come to where those are."""
        self.under_way = 0
        """If the round is announced, the bytes of the server's slices in all such rounds that were open then."""
        if self.given is layout.resident and (
            contribution.absent or contribution.rows or contribution.sources
        ):
            self.given = layout.given(contribution, round_.encoded)
        wants = contribution.outs is not None
        self.is_coming = bytearray(layout.is_resident if wants else len(layout.pieces))
        """Whether the weights of each slice are still to come."""
        self.coming: list[int] = layout.num_resident.tolist() if wants else [0] * len(layout.tables)
        """How many slices of each table are still to come; with none, a plain acknowledgement is."""
        self.open = set(range(len(self.coming)))
        """Tables of which the server has not said yet how the round ended."""
        if round_.is_read:
            self.open = {at for at, coming in enumerate(self.coming) if coming}
        self.rounds = all_tables.round[layout.index]
        self.commits = self._make_commits(round_, all_tables)
        """A row for each table, as of Contribute."""
        self.came = [-1] * len(layout.tables)
        """The version of the weights that came."""
        self.gathered: list[int] = []
        """Slices whose new weights are in memory."""
        self.staged: list[tuple[int, int, Tensor, int]] = []
        """(slice, kind, bytes, first element) of other new weights, which wait for those of other servers."""
        self.levels: dict[int, int] = {}
        """Slice → how many elements of it are here, of those that come in parts."""
        self.shown: list[tuple[int, int]] = []
        """(slice, place) of those that can be read in their place."""
        self.applied: dict[int, int] = {}
        """Table → the version right after this worker's contribution."""
        self.failed: dict[int, int] = {}
        """Table → the next round after the one that failed; -1 when the server did not say."""
        self.skipped: set[int] = set()
        """Tables whose round was not applied because of a veto or a decision."""
        self.held: dict[int, m.Held] = {}
        """Table → what the server measured of a sum that it holds."""
        self.complete: set[int] = set()
        """Tables of which all has come, except for what was measured."""

    def __repr__(self) -> str:
        tables = ", ".join([f"{self.layout.tables[at].name!r}" for at in sorted(self.open)[:3]])
        more = f" and {len(self.open) - 3} more" if len(self.open) > 3 else ""
        state = f"awaits the end for tables {tables}{more}" if self.open else "is over"
        failed = f", {len(self.failed)} tables failed" if self.failed else ""
        held = f", {len(self.held)} tables are held" if self.held else ""
        coming = sum(self.coming)
        slices = f", {coming} slices are to come" if coming else ""
        return (
            f"<{type(self).__name__} for server {self.server}, request {self.number}, "
            f"{len(self.layout.tables)} tables: {state}{slices}{held}{failed}>"
        )

    def _make_commits(self, round_: Round, all_tables: Tables) -> m.Matrix:
        """Make each table's commit. It says how many slices, computed with which version, and what is wanted."""
        contribution, layout = round_.contribution, self.layout
        commits = layout.commits.copy()
        commits[:, 1] = self.rounds
        if self.given is not layout.resident:
            commits[:, 2] = np.bincount(layout.push_table[self.given], minlength=len(layout.tables))
        is_kept, wants = contribution.is_kept or layout.takes_deltas, contribution.outs is not None
        commits[:, 4] = (all_tables.held if is_kept else all_tables.version)[self.server][layout.index]
        flags = m.VETOES * contribution.veto | m.ASSIGNS * contribution.assign
        flags |= m.HAS_JOINED * contribution.joined | m.WANTS_DELTA * is_kept
        flags |= m.WANTS_HALF * layout.takes_half
        if (
            wants
            and contribution.mapped is not None
            and contribution.mapped.is_on
            and round_.session.transport.channel(self.server) is not None
        ):
            flags |= m.MAPS_WEIGHTS | m.KNOWS_PLACES * (layout.mapped is not None)
        if flags or not wants:
            commits[:, 5] = (layout.commits[:, 5] if wants else 0) | flags
        return commits

    def follow(self, kept: Collection[int], are_all: bool) -> None:
        """Come after slices of the only table that were sent ahead; with none (by index) of them, begin anew.

        Args:
            are_all: All that were sent count as they are, so the others need no other generation.
        """
        self.kept = frozenset([at for at in self.given if self.layout.pieces[at].index in kept])
        self.generation = int(not are_all)
        self.commits[:, 3] = self.generation * (len(self.given) - len(self.kept))
        self.commits[:, 5] |= m.DISCARD_EAGER * (not kept)

    def announcement(self, round_: Round, may_change: bool = False) -> m.Contribute | None:
        """Tell a server what commits will say, ahead of slices that it can use one by one.

        None where it is to hear of them only with the slices.
        """
        contribution, layout = round_.contribution, self.layout
        size = len(layout.resident)
        is_long = size > 1 or sum(layout.nbytes) > SENT_ALONE
        kept = np.array(sorted(self.kept) if self.generation else (), np.int64)
        if len(self.given) not in (0, size) or not is_long or len(kept) > KEYS_PER_MESSAGE:
            return None
        self.is_announced = True
        commits, pushes = self.commits.copy(), layout.pushes[kept]
        commits[:, 5] |= m.ANNOUNCES | m.MAY_CHANGE * may_change
        pushes[:, 1], pushes[:, 3] = self.rounds[layout.push_table[kept]], 0
        return m.Contribute(
            pushes,
            (),
            commits,
            hyper=contribution.hyper,
            rescale=contribution.rescale,
            timeout=round_.session.options.timeout,
        )

    def take_over(self, early: ServerRequest) -> None:
        """Go on with the server request announced in the backward pass, and what came of new weights."""
        self.number, self.is_announced = early.number, True
        self.is_coming, self.coming, self.came = early.is_coming, early.coming, early.came
        self.staged, self.levels = early.staged, early.levels

    def messages(self, round_: Round, given: Sequence[int]) -> list[m.Contribute | m.Pull]:
        """Make messages of some slices, the last with the commits of what is not over."""
        layout, contribution, timeout = self.layout, round_.contribution, round_.session.options.timeout
        commits = self.commits if len(self.open) == len(self.commits) else self.commits[sorted(self.open)]
        if round_.is_read:
            return [m.Pull(tuple(commits[:, 0].tolist()), timeout)]
        batches: list[tuple[bytes, Sequence[int], tuple[Tensor, ...]]] = []
        """(form, slices, what they are given)."""
        plain: Sequence[int] = self._encode_some(round_, given, batches) if round_.encoded else given
        runs: list[list[int]] = []
        if contribution.shared_grads:
            runs, plain = _in_place(contribution, layout, plain)
        small = [at for at in plain if layout.begin[at] >= 0]
        if small and contribution.values is not None:
            sources = [_given(contribution, layout, at) for at in small]
            torch._foreach_copy_([self.memory.views[at] for at in small], sources)
        if plain:
            payloads = [
                _whole(contribution, layout, at) if at >= 0 else self.memory.raw[begin:end]
                for at, begin, end in (layout.runs if plain is layout.resident else layout.runs_of(plain))
            ]
            batches.append((b"", plain, tuple(payloads)))
        copied = nbytes = sum([data.nbytes for _, _, payloads in batches for data in payloads])
        for run in runs:
            payloads = [contribution.shared_grads[layout.pieces[at].index] for at in run]
            batches.append((b"", run, tuple(payloads)))
            nbytes += sum([data.nbytes for data in payloads])
        is_apart = copied > SENT_ALONE and (len(given) > 1 or self.is_announced)
        if is_apart and nbytes <= _NEAR and len(round_.server_requests) == 1:
            is_apart = round_.session.transport.channel(self.server) is None
        if is_apart or not batches:
            batches.append((b"", (), ()))  # commits go when the slices are on their way to all servers
        bodies: list[m.Contribute | m.Pull] = []
        for number, (form, own, data) in enumerate(batches, start=1):
            where = np.array(own, np.int64)
            pushes = layout.pushes[where]
            pushes[:, 1] = self.rounds[layout.push_table[where]]
            if self.generation:
                pushes[:, 2] = [at not in self.kept for at in own]
            if form:
                pushes[:, 3] = [one.nbytes for one in data]
            body = m.Contribute(pushes, data, NO_COMMITS, form, timeout=timeout)
            is_cut = self.is_announced and number < len(batches)
            share = self.under_way * nbytes // max(layout.total, 1)
            bodies += cut(body, share, partial(layout.itemsize, form)) if is_cut else [body]
        body.commits, body.hyper, body.rescale = commits, contribution.hyper, contribution.rescale
        if contribution.absent:
            body.absent = tuple(itertools.product(commits[:, 0].tolist(), sorted(contribution.absent)))
        if contribution.guard is not None:
            body.hold = contribution.guard.norm_type
        return bodies

    def _encode_some(
        self,
        round_: Round,
        given: Sequence[int],
        batches: list[tuple[bytes, Sequence[int], tuple[Tensor, ...]]],
    ) -> list[int]:
        """Add a batch for each form in which slices are encoded; returns the others."""
        layout, plain = self.layout, list[int]()
        forms: dict[bytes, list[tuple[int, Tensor]]] = {}
        for at in given:
            of = int(layout.index[layout.table[at]])
            found = round_.encoded.get(of, {}).get(layout.pieces[at].index)
            if found is None:
                plain.append(at)
            else:
                forms.setdefault(found.form, []).append((at, found.data))
        for form, encoded in forms.items():
            some, data = zip(*encoded, strict=True)
            batches.append((form, some, data))
        return plain

    def drop_former(self, table: int) -> None:
        """Drop what has come of new weights of a table, which was taken back: they all come again."""
        layout = self.layout
        self.coming[table], self.came[table] = int(layout.num_resident[table]), -1
        for at in layout.resident:
            self.is_coming[at] |= layout.table[at] == table
        self.gathered = [at for at in self.gathered if layout.table[at] != table]
        self.staged = [one for one in self.staged if layout.table[one[0]] != table]
        self.shown = [one for one in self.shown if layout.table[one[0]] != table]
        self.levels = {at: level for at, level in self.levels.items() if layout.table[at] != table}

    def take_weights(self, weights: m.Weights) -> list[int]:
        """Keep new weights until all have come: until then the round may still fail, or be taken back.

        Returns the tables of which all have come now.
        """
        layout, is_coming, came = self.layout, self.is_coming, self.came
        finished = self._take_places(weights.places) if len(weights.places) else []
        runs: list[tuple[Tensor, int, int, int]] = []
        """(source, where it begins there and ends, where it begins in memory): neighbours here and there together."""
        for slot, version, kind, source, start, nbytes in parts_of(weights):
            at = layout.slots.get(slot)
            if at is None:
                finished += self._take_part(slot, version, kind, source[start : start + nbytes])
                continue
            table = layout.table[at]
            if -1 < came[table] < version and table in self.open:
                self.drop_former(table)
            elif version < came[table]:
                continue  # another reply has newer ones already: they must not be mixed
            end, news = at + 1, is_coming[at]
            if kind == m.ROWS:
                end = layout.end_of_rows(at, source[start : start + nbytes])
                news = is_coming.count(1, at, end)
            if not news:
                continue
            if kind == m.WHOLE and nbytes != layout.nbytes[at]:
                raise ProtocolError(f"a slice of {layout.nbytes[at]} bytes came back with {nbytes} bytes")
            if kind == m.HALF and nbytes != layout.pieces[at].length * torch.bfloat16.itemsize:
                raise ProtocolError(
                    f"a slice of {layout.nbytes[at]} bytes came back rounded, with {nbytes} bytes"
                )
            begin = layout.begin[at]
            if kind != m.WHOLE or begin < 0 or layout.is_converted or self.is_announced:
                self.staged += [(at, kind, source[start : start + nbytes], 0)] if nbytes else []
            else:
                self.gathered.append(at)
                same, first, last, to = runs[-1] if runs else (None, 0, 0, 0)
                if same is source and last == start and to + last - first == begin:
                    runs[-1] = source, first, last + nbytes, to
                else:
                    runs.append((source, start, start + nbytes, begin))
            is_coming[at:end] = bytes(end - at)
            came[table] = version
            self.coming[table] -= news
            if not self.coming[table]:
                finished.append(table)
        for source, first, end, to in runs:
            self.memory.raw[to : to + end - first].copy_(source[first:end])
        return finished

    def _take_part(self, place: int, version: int, kind: int, raw: Tensor) -> list[int]:
        """Keep a part of the new weights of a slice; returns its table where all of it has come now.

        One that leaves a gap is not kept: if what was to fill that is lost, the weights come again as a whole.
        """
        (slot, end), layout = m.place_of(place), self.layout
        at = layout.slots.get(slot)
        if at is None or not end:
            return []
        table, piece = layout.table[at], layout.pieces[at]
        if -1 < self.came[table] < version and table in self.open:
            self.drop_former(table)
        elif version < self.came[table]:
            return []
        itemsize = torch.bfloat16.itemsize if kind == m.HALF else torch_dtype(piece.dtype).itemsize
        begin = self.levels.get(at, 0)
        if not self.is_coming[at] or (end - begin) * itemsize != len(raw):
            return []
        if end > piece.length or kind not in (m.WHOLE, m.HALF):
            raise ProtocolError(
                f"{len(raw)} bytes up to element {end} of a slice of {piece.length} came back as kind {kind}"
            )
        self.staged.append((at, kind, raw, begin))
        self.levels[at], self.came[table] = end, version
        if end < piece.length:
            return []
        self.is_coming[at] = 0
        self.coming[table] -= 1
        return [] if self.coming[table] else [table]

    def _take_places(self, places: m.Matrix) -> list[int]:
        """Note where new weights are; returns the tables of which all are known now."""
        finished = list[int]()
        for slot, version, place in places.tolist():
            at = self.layout.slots.get(slot)
            if at is not None and place == m.STILL and self.layout.mapped is not None:
                finished += self._take_still(self.layout.table[at], version)
            elif at is not None and self.is_coming[at]:
                table = self.layout.table[at]
                self.shown.append((at, place))
                self.is_coming[at] = 0
                self.came[table] = version
                self.coming[table] -= 1
                if not self.coming[table]:
                    finished.append(table)
        return finished

    def _take_still(self, table: int, version: int) -> list[int]:
        """Note that new weights of the only table are where they were; returns it if they are all."""
        coming, mapped = np.frombuffer(self.is_coming, np.uint8), self.layout.mapped
        self.came[table] = version
        self.coming[table] -= int(coming[mapped].sum())
        coming[mapped] = 0
        return [] if self.coming[table] else [table]


class Round:
    """A round under way, and how it ended."""

    def __init__(self, contribution: Contribution, session: Session, is_read: bool = False) -> None:
        self.contribution = contribution
        self.session = session
        self.started = session.clock()
        self.is_read = is_read
        """Whether weights are only read."""
        self.is_given = True
        """Whether this worker computes with the weights that come, and does not only look at them."""
        self.server_requests: list[ServerRequest] = []
        self.open: list[ServerRequest] = []
        """The server requests on which something is still to be said."""
        self.error: KVStoreError | None = None
        self.absent: dict[str, set[int]] = {}
        """Table → keys that no worker contributed to."""
        self.in_force: dict[str, m.InForce] = {}
        """Table → what holds for those that have joined."""
        self.vetoes: dict[str, tuple[int, ...]] = {}
        """Table → ranks because of which its round was not applied; none, where that was decided."""
        self.decided: dict[str, tuple[Measured | None, Decision]] = {}
        """Table → all that was measured, and what is made of it."""
        self.encoded: dict[int, dict[int, EncodedSlice]] = {}
        """Table (index) → its slices as they are sent, where that is not as plain numbers."""
        self.kept: frozenset[int] | None = None
        """The slices (by index) of the only table that were sent ahead and count as they are; None: nothing was."""
        self.aborted: set[str] = set()
        """Tables whose round was given up as soon as one server had failed it."""
        self.is_over = False
        self.rows: dict[tuple[int, int], list[Tensor | None]] = {}
        """(position of the table, first key of a slice) → ids of its rows that came, by server; None for a whole slice.
        Only where workers keep what they have."""

    def __repr__(self) -> str:
        names = [table.name for table in self.contribution.tables]
        shown = f"{names[:3]!r:.200}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        rounds = sorted(
            {int(one) for server_request in self.server_requests for one in server_request.rounds}
        )
        number = "?" if not rounds else str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]}..{rounds[-1]}"
        awaited = ", ".join(
            [
                f"server {server_request.server} (request {server_request.number})"
                for server_request in self.open
            ]
        )
        state = "over" if self.is_over else f"awaits {awaited}" if awaited else "all answers are here"
        error = "" if self.error is None else f", failed with {type(self.error).__name__}"
        return f"<{'Read' if self.is_read else 'Round'} {number} of tables {shown}: {state}{error}>"

    def log(self, state: str, error: BaseException | None = None) -> None:
        """Log a transition of the round; nothing happens unless the session has a debug log."""
        log = self.session.log
        if log is None:
            return
        server_requests = [
            server_request
            for server_request in self.server_requests
            if server_request.server == self.server_requests[0].server
        ]
        state = {"started": "reading", "applied": "read"}.get(state, state) if self.is_read else state
        log.round(
            state,
            self.session.options.namespace,
            [
                number
                for server_request in server_requests
                for number in server_request.layout.commits[:, 0].tolist()
            ],
            [number for server_request in server_requests for number in server_request.rounds.tolist()],
            [table.name for table in self.contribution.tables],
            self.session.options.rank,
            [
                f"server:{server}"
                for server in sorted({server_request.server for server_request in self.open})
            ],
            error,
        )

    def written(self) -> dict[tuple[int, int], Tensor | None]:
        """Tell which rows of each key, or of the first key of each slice, came; None: all."""
        found: dict[tuple[int, int], Tensor | None] = {}
        for key, all_ids in self.rows.items():
            some = [ids for ids in all_ids if ids is not None]
            found[key] = torch.cat(some) if len(some) == len(all_ids) else None
        return found

    def server_requests_of(self, table: RemoteTable) -> Iterator[tuple[ServerRequest, int]]:
        """Return the server requests that a table has, and its position there."""
        for server_request in self.server_requests:
            at = server_request.layout.position.get(table.numbers.get(server_request.server, -1))
            if at is not None:
                yield server_request, at

    def describe_end(self) -> str:
        """Say what servers have yet to do."""
        tables = sorted(
            {
                server_request.layout.tables[at].name
                for server_request in self.open
                for at in server_request.open
            }
        )
        return f"finish with {', '.join(map(repr, tables[:3]))}{', …' if len(tables) > 3 else ''}"

    def is_lost(self, table: RemoteTable) -> bool:
        """Tell whether a table's finished round was not applied on every server. As far as is known."""
        return any(
            at in server_request.open or at in server_request.failed
            for server_request, at in self.server_requests_of(table)
        )

    def finish(self, server_request: ServerRequest, tables: Iterable[int]) -> None:
        """Note that a server has answered all commits, unless measures are still to come."""
        if self.contribution.guard is None:
            server_request.open.difference_update(tables)
        else:
            for at in tables:
                if at in server_request.held or self.vetoes.get(server_request.layout.tables[at].name):
                    server_request.open.discard(at)
                elif at in server_request.open:
                    server_request.complete.add(at)
        if not server_request.open and server_request in self.open:
            self.open.remove(server_request)

    def resume(self) -> None:
        """Get ready to be waited for again after an interrupt. It may have lost what had just come."""
        self.open[:] = [server_request for server_request in self.open if server_request.open]
        for server_request in self.open if self.contribution.outs is not None else ():
            for at in server_request.open:
                server_request.drop_former(at)

    def write(self, server_request: ServerRequest, gone: Collection[int], all_tables: Tables) -> None:
        """Write new weights to their places, but for some tables (by index). Note their versions.

        Raises:
            ProtocolError: a part does not fit its slice.
        """
        layout, outs, unread = server_request.layout, self.contribution.outs, self.contribution.unread
        if outs is None:
            return
        follows = layout.takes_deltas and not self.is_read  # what is only looked at may go elsewhere
        kept = [layout.index[at] not in gone for at in layout.table] if gone else None
        if unread:
            pairs = zip(kept or [True] * len(layout.pieces), layout.pieces, strict=True)
            kept = [is_kept and any(s.key not in unread for s in piece.segments) for is_kept, piece in pairs]
        ready = (
            server_request.gathered if kept is None else [at for at in server_request.gathered if kept[at]]
        )
        if ready:
            targets = [_part(outs[layout.at[layout.table[at]]], layout.pieces[at]) for at in ready]
            torch._foreach_copy_(targets, [server_request.memory.views[at] for at in ready])
        notes = self.contribution.is_kept
        for at in ready if notes else ():
            self.rows[layout.at[layout.table[at]], layout.pieces[at].segments[0].key] = [None]
        for at, kind, raw, begin in server_request.staged:
            if kept is None or kept[at]:
                of, piece = layout.table[at], layout.pieces[at]
                version = server_request.came[of] if follows else -1
                written = _write_staged(
                    layout.tables[of], outs[layout.at[of]], piece, kind, raw, begin, version
                )
                for key, ids in written.items() if notes else ():
                    self.rows.setdefault((layout.at[of], key), []).append(ids)
        if self.contribution.mapped is not None:
            self._map(self.contribution.mapped, server_request, gone)
        server_request.staged.clear()
        came = np.array(server_request.came)
        read = came >= 0
        if gone:
            read &= ~np.isin(layout.index, list(gone))
        if self.is_given:
            all_tables.newest[server_request.server, layout.index[read]] = came[read]
            all_tables.version[server_request.server, layout.index[read]] = came[read]
        if self.contribution.is_kept or follows:
            all_tables.held[server_request.server, layout.index[read]] = came[read]

    def _map(
        self, mapped: MappedWeights | SeenWeights, server_request: ServerRequest, gone: Collection[int]
    ) -> None:
        """Map what a server has shown, and note what came as bytes in its place."""
        pieces = server_request.layout.pieces
        copied = [*server_request.gathered, *[at for at, *_ in server_request.staged]]
        for at in copied:
            mapped.leave(pieces[at])
        if server_request.shown or any([pieces[at].nbytes >= LONG for at in copied]):
            server_request.layout.mapped = None
        for at, place in server_request.shown if not gone else ():
            if mapped.shows(pieces[at], server_request.server, place):
                continue
            memory = self.session.memory_at(server_request.server, place)
            try:
                if memory is None:
                    raise OSError("the channel to its server was lost")
                mapped.show(pieces[at], server_request.server, place, *memory)
            except OSError as error:
                mapped.problem = error
        # A long slice that came as bytes may only have been read by somebody, and have a place the next time.
        if (
            server_request.shown
            and not gone
            and mapped.problem is None
            and all([pieces[at].nbytes < LONG for at in copied])
        ):
            server_request.layout.mapped = np.array([at for at, _ in server_request.shown])


def parts_of(weights: m.Weights) -> Iterator[tuple[int, int, int, Tensor, int, int]]:
    """Yield (slot, version, kind, byte buffer, place in it, size) of each part.

    Raises:
        ProtocolError: the parts are not the buffers.
    """
    payloads = iter(weights.payloads)
    source, start, left = _NO_BYTES, 0, 0
    for slot, version, kind, nbytes in weights.parts.tolist():
        while nbytes and not left and (payload := next(payloads, None)) is not None:
            source = payload.view(torch.uint8)
            start, left = 0, payload.nbytes
        if not 0 <= nbytes <= left:
            raise ProtocolError(f"{nbytes} bytes of slot {slot} are not all in one payload")
        yield slot, version, kind, source, start, nbytes
        start += nbytes
        left -= nbytes


def _write_staged(
    table: RemoteTable, arenas: Arenas, piece: Slice, kind: int, raw: Tensor, begin: int, version: int
) -> Mapping[int, Tensor | None]:
    """Write new weights: a slice from some element on, or rows of it and of its neighbours. Raises as `Round.write`.

    With a `version`, those that come as changes, or have, are followed.

    Returns which rows were written of each key, or of the first one; None where it was something else.
    """
    plan, out, key = table.plan, _part(arenas, piece), piece.segments[0].key
    if table.delta_codec is not None and version >= 0 and kind in (m.WHOLE, m.DELTA):
        out.copy_(_followed(table, table.delta_codec, piece, kind, raw, version)[: piece.used])
        return {key: None}
    if kind in (m.WHOLE, m.HALF):
        given = raw.view(out.dtype if kind == m.WHOLE else torch.bfloat16)
        place = out[begin:][: len(given)]
        given = given[: len(place)]
        place.copy_(_rounded(given) if table.takes_half else given)
        return {key: None}
    if kind != m.ROWS:
        raise ProtocolError(f"slice {piece.index} of {table.name!r} came back as kind {kind}")
    parts, slices = decode_rows(plan, piece, raw.numpy().data, is_joined=True)
    written: Mapping[int, Tensor | None] = {key: None}
    for position, values in parts.items():
        segment = piece.segments[position]
        if isinstance(values, Tensor):
            values = _rounded(values) if table.takes_half else values
            out[segment.start : segment.start + segment.numel].copy_(values)
            continue
        places, start = plan.joined_rows(segment.key), plan.key_offsets[segment.key]
        block = places.blocks[piece.server]
        first = block.order[piece.index]
        for one in block.pieces[first : first + slices]:
            table.followed.pop(one.index, None)  # its rows come from now on
        ids = torch.from_numpy(block.in_key(values.ids.numpy(), first, first + slices))
        rows = _rounded(values.values) if table.takes_half else values.values
        whole = arenas[piece.dtype][start : start + int(places.starts[-1]) * places.width]
        put_rows(whole.view(-1, places.width), ids, rows)
        if len(piece.segments) == 1:
            own = cut_rows(RowSet(ids, rows), places.bounds)
            written = {key: part.ids for key, part in zip(places.keys, own, strict=True)}
    return written


def _followed(table: RemoteTable, codec: Codec, piece: Slice, kind: int, raw: Tensor, version: int) -> Tensor:
    """Follow the weights that all workers have of a slice, by changes or as they are. Raises as `Round.write`.

    They are changed all at once: when it was interrupted and is done again, no changes are added twice.
    """
    if kind == m.WHOLE:
        weights = raw.view(torch_dtype(piece.dtype)).clone()
    elif piece.index not in table.followed:
        raise ProtocolError(f"changes of slice {piece.index} of {table.name!r} came before its weights")
    else:
        known, weights = table.followed[piece.index]
        if known != version:
            weights = weights.clone()
            add_changes(codec, raw, weights)
    table.followed[piece.index] = version, weights
    return weights


def _given(contribution: Contribution, layout: ServerLayout, at: int) -> Tensor:
    """Return the numbers that this rank gives to a slice, where they are; of some keys that is not the arena."""
    piece = layout.pieces[at]
    key, _, start, numel = piece.segments[0]
    if key in contribution.sources:
        return contribution.sources[key](start, numel).contiguous()
    if key in contribution.borrowed:
        return contribution.borrowed[key][start : start + numel]
    assert contribution.values is not None
    arenas = contribution.values[layout.at[layout.table[at]]]
    if layout.begin[at] >= 0:
        return _part(arenas, piece)
    return arenas[piece.dtype][piece.offset : piece.offset + piece.length]


def _in_place(
    contribution: Contribution, layout: ServerLayout, given: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Cut slices, by position, into runs in their server's memory, and all others."""
    others: list[int] = []
    runs: list[list[int]] = []
    end = -1
    for at in given:
        own = contribution.shared_grads.get(layout.pieces[at].index)
        if own is None:
            others.append(at)
            continue
        if own.data_ptr() != end:
            runs.append([])
        runs[-1].append(at)
        end = own.data_ptr() + own.nbytes
    return runs, others


def _whole(contribution: Contribution, layout: ServerLayout, at: int) -> Tensor:
    """Return a slice with its padding, which the end of an arena may lack."""
    length, found = layout.pieces[at].length, _given(contribution, layout, at)
    if len(found) == length:
        return found
    padded = torch.zeros(length, dtype=found.dtype, device="cpu")
    padded[: len(found)] = found
    return padded


def _part(arenas: Arenas, piece: Slice) -> Tensor:
    """Return the numbers of a slice in arenas that the Plan has laid out."""
    flat = arenas[piece.dtype]
    return flat if piece.used == flat.numel() else flat[piece.offset : piece.offset + piece.used]


def _rounded(weights: Tensor) -> Tensor:
    """Weights as `Storage.half` would have sent them, of their own dtype."""
    is_wider = weights.dtype.itemsize > torch.bfloat16.itemsize
    return weights.to(torch.bfloat16).to(weights.dtype) if is_wider else weights
