"""A round whose messages are kept, because most rounds of a table are like the one before.

From one plain round to the next only gradients, options, the number of the round and versions of weights change. A
`CapturedRound` keeps all else: the encoded messages to each server and where their numbers are, what the answer of
each server looks like, and where its weights go. The next round fills in the numbers, sends the messages, compares the
answers with what is expected, and copies the weights.

Invariants:

- It is the same round as on the general path in `Rounds`: the same bytes in the same order, the same failpoints, and
  weights are written only when all servers have answered.
- `fits` is the only guard. Anything but plain gradients, or a change in the session or of the layout, does not fit;
  then the general path runs, and is captured again.
- Nothing unexpected is handled here. `run` returns False after a message that could not be sent at once, an answer
  that looks different, or `PATIENCE`, and raises what interrupts it. Then `Rounds.start` makes the general round from
  what `sent` and `answers` say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

PATIENCE = 0.02
"""Seconds that answers are awaited here. After that the general round waits, which also looks for servers that are
gone. To make it then costs nothing, because there is nothing else to do."""
_PLAIN = Contribution((), (), ())
_NO_PUSHES = m.matrix((), m.PUSH_WORDS)


def _is_plain(contribution: Contribution) -> bool:
    """Return whether there is nothing in it but values, options and what a successor gets."""
    return contribution[5:8] == _PLAIN[5:8] and contribution[10:16] == _PLAIN[10:16]


class CapturedRound:
    """What follows from the shape of a plain round of some tables.

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
        self.is_used = False
        """Whether a later round was like this one."""
        # 1. What the guard compares.
        self._layouts = layouts
        self._num_reconnects, self._num_changes = session.num_reconnects, tables.num_changes
        self._mapped = [layout.mapped for layout in layouts]
        self._shared = list(map(id, contribution.shared_grads.values()))
        self._num_borrowed = len(contribution.borrowed)
        self._sink = contribution.sink
        # 2. What the round sends.
        self.round = Round(contribution, session)
        """A round that is over, and in which nothing special has happened."""
        self.round.is_over = True
        self.round.server_requests = [ServerRequest(layout, self.round, tables) for layout in layouts]
        self._parts = [_ServerPart(request, self.round, tables) for request in self.round.server_requests]
        # The gradients themselves are not kept alive.
        self.round.contribution = contribution._replace(values=None, borrowed={}, shared_grads={})
        self._index = _as_slice(np.array([table.index for table in contribution.tables], np.int64))
        # 3. How far the present round is.
        self.sent: dict[ContributionLayout, int] = {}
        """The number of each request that was sent whole."""
        self.answers: list[tuple[int, Sequence[Frame]]] = []
        """(server, frames) of the answers that have come."""
        self.is_ending = False
        """Whether all answers are as expected, and weights may be written."""
        self.is_late = False
        """Whether only the time was over, and all was as expected until then."""

    @staticmethod
    def can_capture(
        contribution: Contribution, layouts: Sequence[ContributionLayout], session: Session
    ) -> bool:
        """Return whether rounds like this one can be captured: plain gradients to servers that share memory."""
        given = contribution.shared_grads
        return (
            session.options.captures
            and session.options.mode.is_sync
            and session.is_quiet
            and all([session.transport.can_post(layout.server) for layout in layouts])
            and contribution.values is not None
            and contribution.outs is not None
            and _is_plain(contribution)
            and all([layout.num_resident.all() for layout in layouts])
            and not any([
                table.view is not None or table.compressor is not None or table.delta_codec is not None
                or table.takes_half or table.plan.has_row_sparse
                for table in contribution.tables
            ])
            # What is sent has to be in the same place each time, or short enough to be gathered.
            and all([
                slice_.index in given or (begin >= 0 and slice_.segments[0].key not in contribution.borrowed)
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
            and _is_plain(contribution)
            and len(contribution.borrowed) == self._num_borrowed
            and list(map(id, contribution.shared_grads.values())) == self._shared
            and all([a.mapped is b for a, b in zip(layouts, self._mapped, strict=True)])
        )

    def run(self, contribution: Contribution) -> bool:
        """Send the round, wait for the answers, and write the weights; return whether it has ended."""
        try:
            return self._run(contribution)
        finally:
            for part in self._parts:
                part.release()

    def _run(self, contribution: Contribution) -> bool:
        session, parts = self._session, self._parts
        self.sent, self.answers, self.is_ending, self.is_late = {}, [], False, False
        failpoint("worker.round.begin")
        # 1. Send slices, and then commits, as `Rounds` does.
        tail = b""
        if contribution.hyper or contribution.client_state:
            hyper, state = contribution.hyper, contribution.client_state
            tail = encode_extra(m.Contribute(_NO_PUSHES, (), NO_COMMITS, hyper=hyper, client_state=state))
        for first in range(0, len(parts), session.num_servers):
            some = parts[first : first + session.num_servers]
            for part in some:
                part.fill(contribution, session.next_number())
                if not all([session.transport.post(part.server, *message) for message in part.slices]):
                    return False
                failpoint("worker.round.next_slices")
            failpoint("worker.round.commit")
            for part in some:
                if not session.transport.post(part.server, part.head + tail, part.payloads):
                    return False
                self.sent[part.layout] = part.number
                failpoint("worker.round.next_commit")
        failpoint("worker.round.committed")
        # 2. Wait for one answer of each server.
        missing = {part.number: part for part in parts}
        began = now = session.clock()
        while missing:
            got = session.transport.receive_frames(began + PATIENCE - now)
            now = session.clock()
            if got is None:
                self.is_late = now - began >= PATIENCE
                if self.is_late or not all([session.transport.can_post(part.server) for part in parts]):
                    return False
                continue  # what came is not a message
            self.answers.append(got)
            server, frames = got
            number = number_of_message(frames[0])
            if number not in missing or not missing.pop(number).take(frames):
                return False
            session.heard(server, now)
        session.report.wait_seconds += now - began
        # 3. Write the weights.
        self.is_ending = True
        failpoint("worker.round.write")
        assert contribution.outs is not None
        for part in parts:
            part.write(contribution.outs)
            failpoint("worker.round.next_write")
        if self._sink.maps:
            self._sink.commit()
        failpoint("worker.round.written")
        self._tables.round[self._index] += 1
        self.is_used = True
        self.answers.clear()  # the server may use their memory again
        return True


class _ServerPart:
    """What one server is sent, and what it answers."""

    def __init__(self, request: ServerRequest, round_: Round, tables: Tables) -> None:
        self.layout = layout = request.layout
        self.server, self._tables = layout.server, tables
        self._memory, self._index = request.memory, _as_slice(layout.index)
        # 1. The messages, as they are on the general path.
        run, session = round_.session.ids_of(self.server)
        channel = round_.session.transport.channel(self.server)
        assert channel is not None
        bodies = [
            one for body in request.messages(round_, request.given) for one in divided(body, channel.portion)
        ]
        bodies[-1].hyper = bodies[-1].client_state = b""
        encoded = [encode_frames_and_payloads(m.Request(run, session, 0, body)) for body in bodies]
        self._templates = [ContributeTemplate(frames[0]) for frames, _ in encoded]
        self._push_tables = [
            _as_slice(layout.push_table[[layout.slots[slot] for slot in body.pushes[:, 0].tolist()]])
            for body in bodies
        ]
        *slices, self.payloads = [payloads or () for _, payloads in encoded]
        *heads, self.head = [template.frame for template in self._templates]
        self.slices = list(zip(heads, slices, strict=True))
        # 2. Small slices are gathered.
        shared = round_.contribution.shared_grads
        small = [at for at in layout.resident if layout.slices[at].index not in shared]
        self._small = [_Place.of(layout, at, round_.contribution.values or ()) for at in small]
        self._views = [self._memory.views[at] for at in small]
        # 3. The answer. What it looks like is known after the first one.
        self.number = 0
        self._answer: WeightsTemplate | None = None
        self._payload: Frame = b""
        self._versions: Ints = np.zeros(0, np.int64)
        """By table, those of the weights that have come."""
        self._first_versions: Ints = np.zeros(0, np.int64)
        """By table, where in the words of an answer its version is."""
        self._tables_of: Ints | slice = slice(0, 0)
        """The table of each version in an answer."""
        outs = round_.contribution.outs or ()
        self._out_places = {at: _Place.of(layout, at, outs) for at in layout.resident}
        self._pieces: list[_Place] = []
        """What comes as bytes, in the order of the payload."""
        self._cuts: list[tuple[torch.dtype, int, list[int]]] = []
        """(dtype, first byte, numbers of elements) of neighbours in the payload: those of slices and, in between, of
        what fills them up, but for the last one."""

    def fill(self, contribution: Contribution, number: int) -> None:
        """Write the numbers of the coming round into the messages, and gather small slices."""
        self.number = number
        rounds = self._tables.round[self._index]
        for template, of in zip(self._templates, self._push_tables, strict=True):
            template.number[0] = number
            template.pushes[:, 1] = rounds[of]
        last = self._templates[-1]
        last.rescale[0] = math.nan if contribution.rescale is None else contribution.rescale
        last.commits[:, 1] = rounds
        last.commits[:, 4] = self._tables.version[self.server][self._index]
        if self._small:
            torch._foreach_copy_(self._views, _parts_of(contribution.values or (), self._small))

    def take(self, frames: Sequence[Frame]) -> bool:
        """Keep an answer until all servers have answered; return False if it is not as expected."""
        head, answer = frames[0], self._answer or self._learn(frames)
        if answer is None or len(head) != len(answer.frame):
            return False
        self._versions = np.frombuffer(head, np.int64)[self._first_versions]
        answer.number[0] = self.number
        answer.words[answer.versions_at] = self._versions[self._tables_of]
        self._payload = frames[1]
        return answer.frame == head

    def _learn(self, frames: Sequence[Frame]) -> WeightsTemplate | None:
        """Return what answers look like from now on, if this one brings all weights in the plainest form."""
        _, _, _, body = decode_frames(frames)
        layout = self.layout
        if not isinstance(body, m.Weights):
            return None
        # 1. It has to say that mapped slices have not moved, and bring all others as they are.
        mapped = [] if layout.mapped is None else layout.mapped.tolist()
        located = {
            layout.table[layout.slots[slot]] for slot in body.locations[:, 0].tolist() if slot in layout.slots
        }
        if (body.locations[:, 2] != m.SAME_LOCATION).any() or located != {layout.table[at] for at in mapped}:
            return None
        places = [layout.slots.get(slot, -1) for slot in body.parts[:, 0].tolist()]
        if sorted([*mapped, *places]) != layout.resident or (body.parts[:, 2] != m.WHOLE).any():
            return None
        if body.parts[:, 3].tolist() != [layout.nbytes[at] for at in places]:
            return None
        # 2. Which table each version in it is of, and where the weights go.
        answer = WeightsTemplate(frames[0])
        slots = [*body.locations[:, 0].tolist(), *body.parts[:, 0].tolist()]
        of = np.array([layout.table[layout.slots[slot]] for slot in slots], np.int64)
        _, first = np.unique(of, return_index=True)
        self._first_versions, self._tables_of = answer.versions_at[first], _as_slice(of)
        self._pieces = [self._out_places[at] for at in places]
        self._cuts, begin = [], 0
        for at in places:
            slice_, dtype = layout.slices[at], torch_dtype(layout.slices[at].dtype)
            if not self._cuts or self._cuts[-1][0] is not dtype:
                self._cuts.append((dtype, begin, []))
            self._cuts[-1][2].extend([slice_.used, slice_.length - slice_.used])
            begin += layout.nbytes[at]
        for _, _, sizes in self._cuts:
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
        if self._pieces:
            sources: list[Tensor] = []
            for dtype, begin, sizes in self._cuts:
                flat = torch.frombuffer(self._payload, dtype=dtype, count=sum(sizes), offset=begin)
                sources += flat.split_with_sizes(sizes)[::2] if len(sizes) > 1 else [flat]
            torch._foreach_copy_(_parts_of(outs, self._pieces), sources)
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


def _parts_of(memory: Sequence[Arenas], places: Sequence[_Place]) -> list[Tensor]:
    return [
        memory[table][dtype] if part is None else memory[table][dtype][part] for table, dtype, part in places
    ]


def _as_slice(index: Ints) -> Ints | slice:
    """Return what selects the same elements as indices: a slice, which is faster, if there is only one."""
    return slice(int(index[0]), int(index[0]) + 1) if len(index) == 1 else index
