"""One server's share of a round: the messages that give it slices and commits, and what it has answered.

Slices and commits are packed into as few messages as useful. New weights are stored in the request's `IncomingWeights`
until the round has ended on all servers; `Round` holds the state of the round over all servers.

Tables and slices are named by position in the layout of the server. All messages of a request have one number, and so
have those that are sent again.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvstore_server.engine.views import MemberView
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE, SENT_ALONE
from kvtrainer.client.contribution import Contribution, ContributionLayout, EncodedSlice, GatheredContribution
from kvtrainer.client.flow_control import cut
from kvtrainer.client.incoming_weights import IncomingWeights, part_of
from kvtrainer.client.session import Session
from kvtrainer.client.tables import Tables

NO_COMMITS = m.matrix((), m.COMMIT_WORDS)
_FIXED = MemberView(-1, ())
_NEAR = 1 << 20
"""Payloads of up to this many bytes are sent with the commit to the only server of a round if it shares memory: a copy
costs less than a second message. With several servers the commits go last, back to back, to shorten the time in which
a crash would leave the servers one round apart."""


class RoundInputs(Protocol):
    """The attributes of a `Round` that its requests read."""

    contribution: Contribution
    session: Session
    is_read: bool
    as_of_round: int
    repeats_commit: bool
    follows: bool
    closed: MemberView | None
    encoded: dict[int, dict[int, EncodedSlice]]
    server_requests: list[ServerRequest]


class ServerRequest:
    def __init__(self, layout: ContributionLayout, round_: RoundInputs, all_tables: Tables) -> None:
        contribution = round_.contribution
        self.layout = layout
        self.server = layout.server
        # 1. What this rank gives. The buffer of a former round is used again.
        self.number = 0
        """Of all messages of the request."""
        self.memory = layout.spare or GatheredContribution(layout)
        layout.spare = None
        self.given: list[int] = [] if contribution.values is None else layout.resident
        """The slices that this rank gives."""
        self.valid: frozenset[int] = frozenset()
        """Those of them that were pushed eagerly and have not changed since."""
        self.generation = 0
        """Of the others."""
        self.in_flight = 0
        """If an intent was declared, the bytes of the server's slices in all such rounds that were open then."""
        if self.given is layout.resident and (
            contribution.absent or contribution.rows or contribution.sources
        ):
            self.given = layout.given(contribution, round_.encoded)
        wants = contribution.outs is not None
        # 2. What the server has to answer: new weights, or that it has applied the round.
        self.open = set(range(len(layout.tables)))
        """Tables whose end the server has not reported yet."""
        memory_at = round_.session.memory_at
        self.incoming = IncomingWeights(layout, self.memory, self.open, wants, memory_at)
        if round_.is_read and not round_.repeats_commit:
            self.open.intersection_update([at for at, n in enumerate(self.incoming.num_pending) if n])
        self.rounds = all_tables.round[layout.index]
        self.commits = self._make_commits(round_, all_tables)
        """A row for each table, as in `messages.Contribute`."""
        # 3. What it has answered for each table.
        self.applied: dict[int, int] = {}
        """Table → its version right after this worker's contribution."""
        self.failed: dict[int, int] = {}
        """Table → the next round after the one that failed; -1 when the server did not say."""
        self.skipped: set[int] = set()
        """Tables whose round was not applied because of a veto or a decision."""
        self.held: dict[int, m.Held] = {}
        """Table → what the server measured of a sum that it holds."""
        self.complete: set[int] = set()
        """Tables for which everything has come except the measures."""

    def __repr__(self) -> str:
        tables = ", ".join([f"{self.layout.tables[at].name!r}" for at in sorted(self.open)[:3]])
        more = f" and {len(self.open) - 3} more" if len(self.open) > 3 else ""
        state = f"awaits the end for tables {tables}{more}" if self.open else "is over"
        failed = f", {len(self.failed)} tables failed" if self.failed else ""
        held = f", {len(self.held)} tables are held" if self.held else ""
        pending = sum(self.incoming.num_pending)
        slices = f", {pending} slices are to come" if pending else ""
        return (
            f"<{type(self).__name__} for server {self.server}, request {self.number}, "
            f"{len(self.layout.tables)} tables: {state}{slices}{held}{failed}>"
        )

    def _make_commits(self, round_: RoundInputs, all_tables: Tables) -> m.Matrix:
        contribution, layout = round_.contribution, self.layout
        commits = layout.commits.copy()
        commits[:, m.COMMIT_ROUND] = self.rounds
        if self.given is not layout.resident:
            commits[:, m.COMMIT_COUNT] = np.bincount(
                layout.push_table[self.given], minlength=len(layout.tables)
            )
        is_incremental, wants = (
            contribution.is_incremental or layout.takes_deltas,
            contribution.outs is not None,
        )
        commits[:, m.COMMIT_VERSION] = (all_tables.held if is_incremental else all_tables.version)[
            self.server
        ][layout.index]
        flags = m.VETOES * contribution.veto | m.ASSIGNS * contribution.assign
        flags |= m.HAS_JOINED * contribution.joined | m.WANTS_DELTA * is_incremental
        asks = m.FOLLOWS if round_.follows else m.REPEATS
        flags |= m.WANTS_HALF * layout.takes_half | asks * round_.repeats_commit
        if wants and contribution.sink.maps and round_.session.transport.channel(self.server) is not None:
            flags |= m.MAPS_WEIGHTS | m.LOCATIONS_CACHED * (layout.mapped is not None)
        if flags or not wants:
            commits[:, m.COMMIT_FLAGS] = (layout.commits[:, m.COMMIT_FLAGS] if wants else 0) | flags
        return commits

    def follow(self, valid: Collection[int], are_all: bool) -> None:
        """Commit after eager pushes; if none of those is valid, tell the server to discard them.

        Args:
            valid: Slices (by index) that count as they were pushed.
            are_all: No other slice was pushed, so the slices that follow need no new generation.
        """
        self.valid = frozenset([at for at in self.given if self.layout.slices[at].index in valid])
        self.generation = int(not are_all)
        self.commits[:, m.COMMIT_GENERATIONS] = self.generation * (len(self.given) - len(self.valid))
        self.commits[:, m.COMMIT_FLAGS] |= m.DISCARD_EAGER * (not valid)

    def intent(self, round_: RoundInputs, tentative: bool = False) -> m.Contribute | None:
        """Return a message that tells a server what the commit will say, so that it can use single slices before.

        None if that is not worth while: the round is short, or not all of its slices are given.
        """
        contribution, layout = round_.contribution, self.layout
        # Pushed slices that the commit replaces are named, so that the server does not use them.
        size = len(layout.resident)
        is_long = size > 1 or sum(layout.nbytes) > SENT_ALONE
        valid = np.array(sorted(self.valid) if self.generation else (), np.int64)
        if len(self.given) not in (0, size) or not is_long or len(valid) > KEYS_PER_MESSAGE:
            return None
        self.incoming.has_intent = True
        commits, pushes = self.commits.copy(), layout.pushes[valid]
        commits[:, m.COMMIT_FLAGS] |= m.DECLARES_INTENT | m.TENTATIVE * tentative
        pushes[:, m.PUSH_ROUND], pushes[:, m.PUSH_NBYTES] = self.rounds[layout.push_table[valid]], 0
        view = self._view(round_)
        return m.Contribute(
            pushes,
            (),
            commits,
            hyper=contribution.hyper,
            rescale=contribution.rescale,
            timeout=round_.session.options.timeout,
            view=view.number,
            members=view.ranks,
            num_backup=view.num_backup,
        )

    def _view(self, round_: RoundInputs) -> MemberView:
        """Return the members of the round; `_FIXED` if they never change."""
        return round_.closed or self.layout.tables[0].view or _FIXED

    def ask(self, round_: int, shares_memory: bool) -> None:
        """Ask for the weights after a round, instead of what was to be answered."""
        self.given, self.valid = [], frozenset()
        self.failed.clear()
        self.skipped.clear()
        self.open.update(range(len(self.layout.tables)))
        self.start_over(shares_memory)
        self.commits[:, m.COMMIT_ROUND], self.commits[:, m.COMMIT_COUNT : m.COMMIT_VERSION] = round_, 0
        kept = m.WANTS_WEIGHTS | m.WANTS_DELTA | m.WANTS_HALF
        self.commits[:, m.COMMIT_FLAGS] = (self.commits[:, m.COMMIT_FLAGS] & kept) | m.FOLLOWS

    def adopt(self, speculative: ServerRequest) -> None:
        """Adopt the request declared during the backward pass, with the weights already received."""
        self.number, self.incoming = speculative.number, speculative.incoming
        self.incoming.open = self.open

    def start_over(self, shares_memory: bool) -> None:
        """Get ready to be sent again to a server that was restarted, and has lost what is not answered yet.

        The new process does not know which locations this worker knows, and may roll back or change weights that the
        old one had sent before the end of the round.

        Args:
            shares_memory: Whether there is a channel to the new process.
        """
        self.commits[:, m.COMMIT_FLAGS] &= ~(m.LOCATIONS_CACHED | (0 if shares_memory else m.MAPS_WEIGHTS))
        self.held.clear()
        self.complete.clear()
        for at in self.open if self.incoming.are_wanted else ():
            self.incoming.roll_back(at)

    def gather_again(self, at: int) -> None:
        """Discard weights of a table that have come already, before its slices are gathered where these lie.

        The commit follows the slices, so the server sends its weights again.
        """
        if self.incoming.are_wanted and not self.incoming.has_intent:
            self.complete.discard(at)
            self.incoming.roll_back(at)

    def messages(self, round_: RoundInputs, given: Sequence[int]) -> list[m.Contribute | m.Pull]:
        """Make the messages of some slices. The last one has the commits of the tables that are still open."""
        layout, contribution, timeout = self.layout, round_.contribution, round_.session.options.timeout
        commits = self.commits if len(self.open) == len(self.commits) else self.commits[sorted(self.open)]
        if round_.is_read and not round_.repeats_commit:
            return [m.Pull(tuple(commits[:, m.COMMIT_TABLE].tolist()), timeout, round_.as_of_round)]
        # 1. Slices by form: encoded, in shared memory, plain.
        batches: list[tuple[bytes, Sequence[int], tuple[Tensor, ...]]] = []
        """(form, slices, what they are given)."""
        plain: Sequence[int] = self._encode_some(round_, given, batches) if round_.encoded else given
        runs: list[list[int]] = []
        if contribution.shared_grads:
            runs, plain = _split_requested_slices(contribution, layout, plain)
        # 2. Small plain slices are gathered in one buffer; large ones are sent from where they are.
        small = [at for at in plain if layout.begin[at] >= 0]
        if small and contribution.values is not None:
            sources = [_requested_slice_values(contribution, layout, at) for at in small]
            torch._foreach_copy_([self.memory.views[at] for at in small], sources)
        if plain:
            payloads = [
                _padded_request_values(contribution, layout, at) if at >= 0 else self.memory.raw[begin:end]
                for at, begin, end in (layout.runs if plain is layout.resident else layout.runs_of(plain))
            ]
            batches.append((b"", plain, tuple(payloads)))
        copied = nbytes = sum([data.nbytes for _, _, payloads in batches for data in payloads])
        for run in runs:
            payloads = [contribution.shared_grads[layout.slices[at].index] for at in run]
            batches.append((b"", run, tuple(payloads)))
            nbytes += sum([data.nbytes for data in payloads])
        # 3. Commits go in a message of their own, unless all of it is short.
        is_apart = copied > SENT_ALONE and (len(given) > 1 or self.incoming.has_intent)
        if is_apart and nbytes <= _NEAR and len(round_.server_requests) == 1:
            is_apart = round_.session.transport.channel(self.server) is None
        if is_apart or not batches:
            batches.append((b"", (), ()))  # commits go when the slices are on their way to all servers
        # 4. One message for each batch; long ones are cut if the server uses them part by part.
        bodies: list[m.Contribute | m.Pull] = []
        for number, (form, own, data) in enumerate(batches, start=1):
            where = np.array(own, np.int64)
            pushes = layout.pushes[where]
            pushes[:, m.PUSH_ROUND] = self.rounds[layout.push_table[where]]
            if self.generation:
                pushes[:, m.PUSH_GENERATION] = [at not in self.valid for at in own]
            if form:
                pushes[:, m.PUSH_NBYTES] = [one.nbytes for one in data]
            body = m.Contribute(pushes, data, NO_COMMITS, form, timeout=timeout)
            is_cut = self.incoming.has_intent and number < len(batches)
            share = self.in_flight * nbytes // max(layout.total, 1)
            bodies += cut(body, share, partial(layout.itemsize, form)) if is_cut else [body]
        # 5. The commits.
        body.commits, body.hyper, body.rescale = commits, contribution.hyper, contribution.rescale
        body.client_state = contribution.client_state
        view = self._view(round_)
        body.view, body.members, body.num_backup, body.closes = *view[:3], view.closes >= 0
        if contribution.absent:
            body.absent = tuple(
                itertools.product(commits[:, m.COMMIT_TABLE].tolist(), sorted(contribution.absent))
            )
        if contribution.guard is not None:
            body.hold = contribution.guard.norm_type
        return bodies

    def _encode_some(
        self,
        round_: RoundInputs,
        given: Sequence[int],
        batches: list[tuple[bytes, Sequence[int], tuple[Tensor, ...]]],
    ) -> list[int]:
        layout, plain = self.layout, list[int]()
        forms: dict[bytes, list[tuple[int, Tensor]]] = {}
        for at in given:
            of = int(layout.index[layout.table[at]])
            found = round_.encoded.get(of, {}).get(layout.slices[at].index)
            if found is None:
                plain.append(at)
            else:
                forms.setdefault(found.form, []).append((at, found.data))
        for form, encoded in forms.items():
            some, data = zip(*encoded, strict=True)
            batches.append((form, some, data))
        return plain


def _requested_slice_values(contribution: Contribution, layout: ContributionLayout, at: int) -> Tensor:
    slice_ = layout.slices[at]
    key, _, start, numel = slice_.segments[0]
    if key in contribution.sources:
        return contribution.sources[key](start, numel).contiguous()
    if key in contribution.borrowed:
        return contribution.borrowed[key][start : start + numel]
    assert contribution.values is not None
    arenas = contribution.values[layout.at[layout.table[at]]]
    if layout.begin[at] >= 0:
        return part_of(arenas, slice_)
    return arenas[slice_.dtype][slice_.offset : slice_.offset + slice_.length]


def _split_requested_slices(
    contribution: Contribution, layout: ContributionLayout, given: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """Return the slices in the server's memory, neighbours together, and all others."""
    others: list[int] = []
    runs: list[list[int]] = []
    end = -1
    for at in given:
        own = contribution.shared_grads.get(layout.slices[at].index)
        if own is None:
            others.append(at)
            continue
        if own.data_ptr() != end:
            runs.append([])
        runs[-1].append(at)
        end = own.data_ptr() + own.nbytes
    return runs, others


def _padded_request_values(contribution: Contribution, layout: ContributionLayout, at: int) -> Tensor:
    """Return the values of a slice with its padding, which the end of an arena may lack."""
    length, found = layout.slices[at].length, _requested_slice_values(contribution, layout, at)
    if len(found) == length:
        return found
    padded = torch.zeros(length, dtype=found.dtype, device="cpu")
    padded[: len(found)] = found
    return padded
