"""Capture and replay of synchronous rounds: the fast path of workers that share memory with all their servers.

Most rounds of a table are like the one before: only gradients, options, the numbers of requests and rounds, and the
versions of weights change. After an ordinary round a `CapturedRound` keeps all else: the encoded request to each
server, what the answer of each server looks like, and where its weights go. Its `replay` writes the numbers and
gradients of the next round into the requests, sends them, compares the answers with what is expected byte for byte,
and copies the weights. The server has its own half, in `kvstore_server/engine/captured.py`.

Invariants:

- It is the same round as on the general path in `Rounds`: the same bytes in the same order, the same failpoints, and
  weights are written only when all servers have answered.
- `fits` is the only check before something is sent. Anything but plain gradients, or a change in the session or of the
  layout, does not fit; then the general path runs, and is captured again.
- Nothing unexpected is handled here. If a message cannot be sent at once, or an answer looks different or does not come
  within `ANSWER_TIMEOUT`, `replay` returns False, and `Rounds.start` continues on the general path from what `sent` and
  `answers` say. It does the same after an exception, which `replay` does not catch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.engine.rounds import Ints
from kvstore_server.failpoints import failpoint
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import (
    ContributeTemplate,
    Frame,
    WeightsTemplate,
    decode_frames,
    divided,
    encode_extra,
    encode_frames_and_payloads,
    number_of_message,
)
from kvtrainer.client.contribution import Contribution, ContributionLayout
from kvtrainer.client.round import Round
from kvtrainer.client.server_request import NO_COMMITS, ServerRequest
from kvtrainer.client.session import Session
from kvtrainer.client.tables import Tables
from kvtrainer.types import Arenas

ANSWER_TIMEOUT = 0.02
"""Seconds that answers are awaited here. Then the general path waits, which also looks for servers that are gone. The
switch costs nothing, because the worker has nothing else to do."""
_NO_PUSHES = m.matrix((), m.PUSH_WORDS)


class CapturedRound:
    """The requests and expected answers of a plain round of some tables.

    Args:
        contribution: Of a round that has ended; its values are read.
        layouts: Of its tables, for each server.
    """

    def __init__(
        self,
        contribution: Contribution,
        layouts: Sequence[ContributionLayout],
        session: Session,
        tables: Tables,
    ) -> None:
        self._session, self._tables = session, tables
        self.was_replayed = False
        # 1. What the guard compares.
        self._layouts = layouts
        self._num_reconnects, self._num_changes = session.num_reconnects, tables.num_changes
        self._mapped = [layout.mapped for layout in layouts]
        self._shared_grads = _addresses(contribution.shared_grads)
        self._num_borrowed = len(contribution.borrowed)
        self._sink = contribution.sink
        # 2. What the round sends.
        self.round = Round(contribution, session)
        """What a replay returns: a round that is over, and in which nothing special has happened."""
        self.round.is_over = True
        self.round.server_requests = [ServerRequest(layout, self.round, tables) for layout in layouts]
        self._requests = [
            _CapturedRequest(request, self.round, tables) for request in self.round.server_requests
        ]
        # The gradients themselves are not kept alive.
        self.round.contribution = contribution._replace(values=None, borrowed={}, shared_grads={})
        self._index = _slice_if_single(np.array([table.index for table in contribution.tables], np.int64))
        # 3. How far the present replay is.
        self.sent: dict[ContributionLayout, int] = {}
        """The number of each request that was sent completely."""
        self.answers: list[tuple[int, Sequence[Frame]]] = []
        """(server, frames) of the answers that have come."""
        self.is_writing = False
        """Whether all answers were as expected, so that weights may be written in part."""
        self.has_timed_out = False
        """Whether only the timeout has ended it, so that the next round may be replayed again."""

    @staticmethod
    def can_capture(
        contribution: Contribution, layouts: Sequence[ContributionLayout], session: Session
    ) -> bool:
        """Return whether rounds like this one can be captured: plain gradients to servers that share memory."""
        shared = contribution.shared_grads
        return (
            session.options.captures
            and session.options.mode.is_sync
            and session.is_quiet
            and all([session.transport.can_post(layout.server) for layout in layouts])
            and contribution.values is not None
            and contribution.outs is not None
            and contribution.is_plain
            and all([layout.num_resident.all() for layout in layouts])
            and not any([
                table.view is not None or table.compressor is not None or table.delta_codec is not None
                or table.takes_half or table.plan.has_row_sparse
                for table in contribution.tables
            ])
            # What is sent has to be in the same place each time, or short enough to be gathered.
            and all([
                slice_.index in shared or (begin >= 0 and slice_.segments[0].key not in contribution.borrowed)
                for layout in layouts
                for slice_, begin in zip(layout.slices, layout.begin, strict=True)
            ])
        )  # fmt: skip

    def fits(self, contribution: Contribution, layouts: Sequence[ContributionLayout] | None) -> bool:
        """Return whether a round with this contribution is like the captured one."""
        return (
            layouts is self._layouts
            and self._session.num_reconnects == self._num_reconnects
            and self._tables.num_changes == self._num_changes
            and self._session.is_quiet
            and contribution.values is not None
            and contribution.outs is not None
            and contribution.sink is self._sink
            and contribution.is_plain
            and len(contribution.borrowed) == self._num_borrowed
            and _addresses(contribution.shared_grads) == self._shared_grads
            and all([a.mapped is b for a, b in zip(layouts, self._mapped, strict=True)])
        )

    def replay(self, contribution: Contribution) -> bool:
        """Send the requests, wait for the answers, and write the weights; return whether the round has ended."""
        try:
            return self._replay(contribution)
        finally:
            for request in self._requests:
                request.release()

    def _replay(self, contribution: Contribution) -> bool:
        session, requests = self._session, self._requests
        self.sent, self.answers, self.is_writing, self.has_timed_out = {}, [], False, False
        failpoint("worker.round.begin")
        # 1. Send slices, and then commits, as `Rounds` does: the tables come in groups, each with a request to every
        # server.
        tail = b""
        if contribution.hyper or contribution.client_state:
            hyper, state = contribution.hyper, contribution.client_state
            tail = encode_extra(m.Contribute(_NO_PUSHES, (), NO_COMMITS, hyper=hyper, client_state=state))
        for first in range(0, len(requests), session.num_servers):
            group = requests[first : first + session.num_servers]
            for request in group:
                request.fill(contribution, session.next_number())
                if not all([session.transport.post(request.server, *message) for message in request.slices]):
                    return False
                failpoint("worker.round.next_slices")
            failpoint("worker.round.commit")
            for request in group:
                # Options and the state of a successor are the last fields of a message.
                if not session.transport.post(request.server, request.header + tail, request.payloads):
                    return False
                self.sent[request.layout] = request.number
                failpoint("worker.round.next_commit")
        failpoint("worker.round.committed")
        # 2. Wait for one answer to each request.
        missing = {request.number: request for request in requests}
        began = now = session.clock()
        while missing:
            got = session.transport.receive_frames(began + ANSWER_TIMEOUT - now)
            now = session.clock()
            if got is None:
                self.has_timed_out = now - began >= ANSWER_TIMEOUT
                if self.has_timed_out:
                    return False
                if not all([session.transport.can_post(request.server) for request in requests]):
                    return False
                continue  # woken up without a message
            self.answers.append(got)
            server, frames = got
            number = number_of_message(frames[0])
            if number not in missing or not missing.pop(number).accept(frames):
                return False
            session.heard(server, now)
        session.report.wait_seconds += now - began
        # 3. Write the weights.
        self.is_writing = True
        failpoint("worker.round.write")
        assert contribution.outs is not None
        for request in requests:
            request.write(contribution.outs)
            failpoint("worker.round.next_write")
        if self._sink.maps:
            self._sink.commit()
        failpoint("worker.round.written")
        self._tables.round[self._index] += 1
        self.was_replayed = True
        self.answers.clear()  # the server may use their memory again
        return True


def _addresses(shared_grads: Mapping[int, Tensor]) -> list[int]:
    return [gradient.data_ptr() for gradient in shared_grads.values()]


class _CapturedRequest:
    """A request to one server, and its answer."""

    def __init__(self, request: ServerRequest, round_: Round, tables: Tables) -> None:
        self.layout = layout = request.layout
        self.server, self._tables = layout.server, tables
        self._memory, self._index = request.memory, _slice_if_single(layout.index)
        # 1. The messages, as they are on the general path.
        run_id, session_id = round_.session.ids_of(self.server)
        channel = round_.session.transport.channel(self.server)
        assert channel is not None
        bodies = [
            one for body in request.messages(round_, request.given) for one in divided(body, channel.portion)
        ]
        bodies[-1].hyper = bodies[-1].client_state = b""
        encoded = [encode_frames_and_payloads(m.Request(run_id, session_id, 0, body)) for body in bodies]
        self._templates = [ContributeTemplate(frames[0]) for frames, _ in encoded]
        self._push_tables = [
            _slice_if_single(
                layout.push_table[[layout.slots[slot] for slot in body.pushes[:, m.PUSH_SLOT].tolist()]]
            )
            for body in bodies
        ]
        *slices, self.payloads = [payloads or () for _, payloads in encoded]
        *headers, self.header = [template.frame for template in self._templates]
        self.slices = list(zip(headers, slices, strict=True))
        # 2. Small slices are gathered.
        shared = round_.contribution.shared_grads
        small = [at for at in layout.resident if layout.slices[at].index not in shared]
        self._small = [_Place.of(layout, at, round_.contribution.values or ()) for at in small]
        self._gathered = [self._memory.views[at] for at in small]
        # 3. The answer. What it looks like is known after the first one.
        self.number = 0
        self._answer: WeightsTemplate | None = None
        self._payload: Frame = b""
        self._versions: Ints = np.zeros(0, np.int64)
        """By table, those of the weights that have come."""
        self._first_versions: Ints = np.zeros(0, np.int64)
        """By table, where in the words of an answer its version is."""
        self._version_tables: Ints | slice = slice(0, 0)
        """The table of each version in an answer."""
        outs = round_.contribution.outs or ()
        self._out_places = {at: _Place.of(layout, at, outs) for at in layout.resident}
        self._destinations: list[_Place] = []
        """Of the slices that come as bytes, in the order of the payload."""
        self._split_sizes: list[tuple[torch.dtype, int, list[int]]] = []
        """(dtype, first byte, sizes) of slices that are adjacent in the payload. The sizes, in elements, alternate
        between a slice and the padding after it; that of the last slice is left out."""

    def fill(self, contribution: Contribution, number: int) -> None:
        """Write the numbers of the request and the rounds into the messages, and gather small slices."""
        self.number = number
        rounds = self._tables.round[self._index]
        for template, push_tables in zip(self._templates, self._push_tables, strict=True):
            template.number[0] = number
            template.pushes[:, m.PUSH_ROUND] = rounds[push_tables]
        last = self._templates[-1]
        last.rescale[0] = math.nan if contribution.rescale is None else contribution.rescale
        last.commits[:, m.COMMIT_ROUND] = rounds
        last.commits[:, m.COMMIT_VERSION] = self._tables.version[self.server][self._index]
        if self._small:
            torch._foreach_copy_(self._gathered, _views_at(contribution.values or (), self._small))

    def accept(self, frames: Sequence[Frame]) -> bool:
        """Keep an answer until all servers have answered; return False if it is not as expected.

        Any version is accepted, the same one for all slices of a table. All other bytes have to be as expected.
        """
        header, expected = frames[0], self._answer or self._capture_answer(frames)
        if expected is None or len(header) != len(expected.frame):
            return False
        self._versions = np.frombuffer(header, np.int64)[self._first_versions]
        expected.number[0] = self.number
        expected.words[expected.versions_at] = self._versions[self._version_tables]
        self._payload = frames[1]
        return expected.frame == header

    def _capture_answer(self, frames: Sequence[Frame]) -> WeightsTemplate | None:
        """Return what answers look like from now on, if this one brings all weights in the plainest form."""
        _, _, _, body = decode_frames(frames)
        layout = self.layout
        if not isinstance(body, m.Weights):
            return None
        # 1. It has to say that mapped slices have not moved, and bring all others as they are.
        mapped = [] if layout.mapped is None else layout.mapped.tolist()
        located = {
            layout.table[layout.slots[slot]]
            for slot in body.locations[:, m.LOCATION_SLOT].tolist()
            if slot in layout.slots
        }
        if (body.locations[:, m.LOCATION_PLACE] != m.SAME_LOCATION).any() or located != {
            layout.table[at] for at in mapped
        }:
            return None
        places = [layout.slots.get(slot, -1) for slot in body.parts[:, m.PART_SLOT].tolist()]
        if sorted([*mapped, *places]) != layout.resident or (body.parts[:, m.PART_KIND] != m.WHOLE).any():
            return None
        if body.parts[:, m.PART_NBYTES].tolist() != [layout.nbytes[at] for at in places]:
            return None
        # 2. Which table each version in it is of, and where the weights go.
        answer = WeightsTemplate(frames[0])
        slots = [*body.locations[:, m.LOCATION_SLOT].tolist(), *body.parts[:, m.PART_SLOT].tolist()]
        tables = np.array([layout.table[layout.slots[slot]] for slot in slots], np.int64)
        _, first = np.unique(tables, return_index=True)
        self._first_versions, self._version_tables = answer.versions_at[first], _slice_if_single(tables)
        self._destinations = [self._out_places[at] for at in places]
        self._split_sizes, begin = [], 0
        for at in places:
            slice_, dtype = layout.slices[at], torch_dtype(layout.slices[at].dtype)
            if not self._split_sizes or self._split_sizes[-1][0] is not dtype:
                self._split_sizes.append((dtype, begin, []))
            self._split_sizes[-1][2].extend([slice_.used, slice_.length - slice_.used])
            begin += layout.nbytes[at]
        for _, _, sizes in self._split_sizes:
            del sizes[-1]
        self._answer = answer
        return answer

    def release(self) -> None:
        """Give the memory of the answer back to the server, once its frames are not needed any more."""
        self._payload = b""

    def write(self, outs: Sequence[Arenas]) -> None:
        """Write the weights that have come, and store their versions."""
        tables, versions = self._tables, self._versions
        tables.newest[self.server, self._index] = versions
        if self._destinations:
            sources: list[Tensor] = []
            for dtype, begin, sizes in self._split_sizes:
                flat = torch.frombuffer(self._payload, dtype=dtype, count=sum(sizes), offset=begin)
                sources += flat.split_with_sizes(sizes)[::2] if len(sizes) > 1 else [flat]
            torch._foreach_copy_(_views_at(outs, self._destinations), sources)
        tables.version[self.server, self._index] = versions


class _Place(NamedTuple):
    """Where a slice is in the memory of its table."""

    table: int
    """By position in the round."""
    dtype: str
    part: slice | None
    """None: it is all of that memory."""

    @classmethod
    def of(cls, layout: ContributionLayout, at: int, memory: Sequence[Arenas]) -> _Place:
        slice_, table = layout.slices[at], layout.at[layout.table[at]]
        is_all = memory[table][slice_.dtype].numel() == slice_.used
        return cls(table, slice_.dtype, None if is_all else slice(slice_.offset, slice_.offset + slice_.used))


def _views_at(memory: Sequence[Arenas], places: Sequence[_Place]) -> list[Tensor]:
    return [
        memory[table][dtype] if part is None else memory[table][dtype][part] for table, dtype, part in places
    ]


def _slice_if_single(index: Ints) -> Ints | slice:
    """Return indices; a single one as a slice, which selects the same element faster."""
    return slice(int(index[0]), int(index[0]) + 1) if len(index) == 1 else index
