"""Requests of a round: slices and commits for one server, and what is announced before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import SENT_ALONE
from kvstore_server.rounds import Ints
from kvtrainer.comm.contribution import Contribution
from kvtrainer.comm.layout import Layout
from kvtrainer.comm.parts import cut, size_of_parts
from kvtrainer.comm.round import Leg, Round

NO_COMMITS = m.matrix((), m.COMMIT_WORDS)
_NONE = np.zeros(0, np.int64)


def messages(
    round_: Round, leg: Leg, given: Sequence[int], timeout: float
) -> Iterator[m.Contribute | m.Pull]:
    """Yield messages that carry some slices of a leg, and with the last of them the commits of what is not over."""
    layout, contribution = leg.layout, round_.contribution
    commits = leg.commits if len(leg.open) == len(leg.commits) else leg.commits[sorted(leg.open)]
    if round_.is_read:
        yield m.Pull(tuple(commits[:, 0].tolist()), timeout)
        return
    batches: list[tuple[bytes, Ints, tuple[Tensor, ...]]] = []
    plain: Sequence[int] = given
    if round_.encoded:
        plain = []
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
            batches.append((form, np.array(some, np.int64), data))
    small = [at for at in plain if layout.begin[at] >= 0]
    if small and contribution.values is not None:
        sources = [_given(contribution, layout, at) for at in small]
        torch._foreach_copy_([leg.memory.views[at] for at in small], sources)
    groups: Sequence[Sequence[int]] = [plain] if plain else []
    if contribution.born:
        groups = _apart(contribution, layout, plain)
    for own in groups:
        runs = layout.runs if own is layout.resident else layout.runs_of(own)
        payloads = [
            _whole(contribution, layout, at) if at >= 0 else leg.memory.raw[begin:end]
            for at, begin, end in runs
        ]
        batches.append((b"", np.array(own, np.int64), tuple(payloads)))
    nbytes = sum([data.nbytes for _, _, payloads in batches for data in payloads])
    if nbytes > SENT_ALONE and (len(given) > 1 or leg.is_announced):
        batches.append((b"", _NONE, ()))  # commits go when the slices are on their way to all servers
    last = len(batches) - 1
    for number, (form, where, data) in enumerate(batches or [(b"", _NONE, ())]):
        pushes = layout.pushes[where]
        pushes[:, 1] = leg.rounds[layout.push_table[where]]
        if leg.generation:
            pushes[:, 2] = [at not in leg.kept for at in where.tolist()]
        if form:
            pushes[:, 3] = [one.nbytes for one in data]
        if number < last:
            body = m.Contribute(pushes, data, NO_COMMITS, form, timeout=timeout)
            yield from (
                cut(body, size_of_parts(sum(layout.nbytes))) if leg.is_announced and not form else (body,)
            )
            continue
        numbers = commits[:, 0].tolist() if contribution.absent else ()
        absent = tuple([(number, key) for number in numbers for key in sorted(contribution.absent)])
        hold = contribution.guard.norm_type if contribution.guard is not None else 0.0
        yield m.Contribute(
            pushes, data, commits, form, contribution.hyper, absent, contribution.rescale, timeout, hold
        )


def announcement(round_: Round, leg: Leg, timeout: float) -> m.Contribute | None:
    """Tell a server what the commits will say, before it gets the slices that it can use one by one.

    None where it is to hear of them only with the slices.
    """
    contribution, layout = round_.contribution, leg.layout
    size, num_kept = len(layout.resident), len(leg.kept) if leg.generation else 0
    is_long = size > 1 or sum(layout.nbytes) > SENT_ALONE
    if len(leg.given) not in (0, size) or not is_long or num_kept:
        return None
    leg.is_announced = True
    commits = leg.commits.copy()
    commits[:, 5] |= m.ANNOUNCES
    pushes = leg.layout.pushes[_NONE]
    return m.Contribute(
        pushes, (), commits, hyper=contribution.hyper, rescale=contribution.rescale, timeout=timeout
    )


def _given(contribution: Contribution, layout: Layout, at: int) -> Tensor:
    """The numbers that this rank gives to a slice, where they are; of some keys that is not the arena."""
    piece = layout.pieces[at]
    key, _, start, numel = piece.segments[0]
    if piece.index in contribution.born:
        return contribution.born[piece.index]
    if key in contribution.sources:
        return contribution.sources[key](start, numel).contiguous()
    if key in contribution.lent:
        return contribution.lent[key][start : start + numel]
    assert contribution.values is not None
    flat = contribution.values[layout.at[layout.table[at]]][piece.dtype]
    return flat[piece.offset : piece.offset + (piece.used if layout.begin[at] >= 0 else piece.length)]


def _apart(contribution: Contribution, layout: Layout, given: Sequence[int]) -> list[list[int]]:
    """Separate slices, by position, that lie one behind the other in memory of their server, and all others."""
    others: list[int] = []
    runs: list[list[int]] = []
    end = -1
    for at in given:
        own = contribution.born.get(layout.pieces[at].index)
        if own is None:
            others.append(at)
            continue
        if own.data_ptr() != end:
            runs.append([])
        runs[-1].append(at)
        end = own.data_ptr() + own.nbytes
    return [others, *runs] if others else runs


def _whole(contribution: Contribution, layout: Layout, at: int) -> Tensor:
    """A slice with its padding, which the end of an arena may lack."""
    length, found = layout.pieces[at].length, _given(contribution, layout, at)
    if len(found) == length:
        return found
    padded = torch.zeros(length, dtype=found.dtype)
    padded[: len(found)] = found
    return padded
