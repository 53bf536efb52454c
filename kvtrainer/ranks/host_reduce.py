"""One gradient from each host: workers of one host sum theirs in memory, and the lowest rank gives the sum to servers.

It also gets the new weights, and hands them on. The others take part in the round with nothing, and ask for nothing:
to servers that is a contribution like any other, so how rounds end, are held, repeated or fail is as without it.

Before a round all workers of a host say what they are about to give. Where that is not the same, or is more than plain
numbers, each of them gives its own, as without it. So a sum is a left fold in rank order within a host, and then over
hosts by their lowest ranks.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor

from kvstore_server.errors import DeadlineError, KVStoreError, WorkerLostError
from kvstore_server.plan import SIZES, Plan
from kvtrainer.client.client import Client
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.server_request import Round
from kvtrainer.common.env import name_host
from kvtrainer.ranks.shared_memory import Heard, RankMemory, share_memory

_log = logging.getLogger(__name__)

# After so many rounds in a row in which every worker gave its own gradient, the log says so.
_SEPARATE = 20
# Of a rank's part in a round: whether it is plain numbers, a digest of the keys that it leaves out, its factor.
_TERMS = struct.Struct("<?16sd")


class HostSum:
    """The workers of this host, of which one gives what all have. Used by one thread of each.

    Every worker makes the same rounds in the same order. After an error it cannot be used any more.

    Args:
        memory: that they share.
        rank: of this one.
        ranks: of all of them, ascending.
    """

    def __init__(self, memory: RankMemory, rank: int, ranks: Sequence[int]) -> None:
        self._memory = memory
        self._rank, self._ranks = rank, ranks
        self._is_leader = rank == ranks[0]
        # Of the lowest rank: dtype name → the last sum.
        self._sums: dict[str, Tensor] = {}
        # Whether one gives for all in this round.
        self._is_joint = False
        # Rounds in a row in which it was not so.
        self._separate = 0
        self._error: KVStoreError | None = None

    def before(self, own: Contribution) -> Contribution:
        """Return what replaces this worker's part in a round, after a sum if one is due.

        The sum may not change before the round is over. Blocks until all workers of the host are here.

        Raises:
            WorkerLostError: a worker of the host has ended, or left.
            DeadlineError: one did not come in time.
            ProtocolError: one came with another call.
        """
        with self._noting_errors():
            terms = self._terms_of_all(own)
            is_common = len({scale for _, _, scale in terms}) == 1
            # What compression holds back is of gradients without their factors.
            can_differ = is_common or own.tables[0].compressor is None
            self._is_joint = can_differ and all(one[:2] == (True, terms[0][1]) for one in terms)
            self._count(terms)
            if not self._is_joint:
                return own
            assert own.values is not None
            factor = 1.0 if is_common or own.rescale is None else own.rescale
            rescale = own.rescale if is_common else 1.0
            for dtype, flat in own.values[0].items():
                self._memory.sum([(flat, self._place(dtype, flat))], flat.dtype, factor, for_all=False)
        if not self._is_leader:
            return own._replace(values=None, outs=None, rescale=rescale)
        return own._replace(values=[self._sums], rescale=rescale)

    def after(self, own: Contribution, round_: Round) -> None:
        """Hand new weights of an applied round on to where this worker's part wants them.

        Raises as `before`; then the weights here may be of two rounds.
        """
        if not self._is_joint or round_.vetoes or own.outs is None:
            return
        with self._noting_errors("; the weights here may be of two rounds"):
            for flat in own.outs[0].values():
                self._memory.broadcast(flat)
        for server_request in round_.server_requests if not self._is_leader else ():
            for at, version in server_request.applied.items():
                server_request.layout.tables[at].note_version(server_request.server, version)

    def close(self) -> None:
        """Leave the others; idempotent."""
        self._memory.close()

    def _terms_of_all(self, own: Contribution) -> list[tuple[bool, bytes, float]]:
        """Exchange what the workers are about to give."""
        is_special = own.rows or own.sources or own.borrowed or own.unread or own.veto or own.assign
        is_plain = own.values is not None and not (is_special or own.joined or own.is_kept)
        absent = torch.tensor(sorted(own.absent), dtype=torch.int64, device="cpu").numpy().tobytes()
        digest = blake2b(absent, digest_size=16).digest()
        mine = _TERMS.pack(is_plain, digest, 1.0 if own.rescale is None else own.rescale)
        heard = self._memory.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [_TERMS.unpack(one.numpy().tobytes()) for one in heard]

    def _count(self, terms: Sequence[tuple[bool, bytes, float]]) -> None:
        """Say so, once, where workers go on giving their gradients one by one."""
        self._separate = 0 if self._is_joint else self._separate + 1
        if self._separate == _SEPARATE and self._is_leader:
            special = [str(rank) for rank, one in zip(self._ranks, terms, strict=True) if not one[0]]
            why = f"those of rank {', '.join(special)} were more than plain numbers, or none"
            if not special:
                why = "they were of different parameters, or of other batch sizes with compression"
            _log.warning(
                "hierarchy=True has had no effect on this host in the last %d steps, in which its workers gave their "
                "gradients one by one: %s",
                _SEPARATE,
                why,
            )

    def takes(self, plan: Plan) -> bool:
        """Tell whether sums of hosts are made of such parameters."""
        halves = [spec.key for spec in plan.specs if SIZES[spec.dtype] < SIZES["float32"]]
        if halves and self._is_leader:
            _log.warning(
                "hierarchy=True has no effect: %r is in half precision, the sum of which would travel in float32",
                halves[0],
            )
        return not halves

    def _place(self, dtype: str, like: Tensor) -> Tensor:
        """Say where sums go; on the others they do not go anywhere."""
        if not self._is_leader:
            return like
        known = self._sums.get(dtype)
        if known is None or known.shape != like.shape:
            known = self._sums[dtype] = torch.empty_like(like)
        return known

    @contextmanager
    def _noting_errors(self, more: str = "") -> Iterator[None]:
        """Turn the system's errors into this project's. Raise the first one again in all later rounds."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        try:
            yield
        except (KVStoreError, OSError) as error:
            self._error = error if isinstance(error, KVStoreError) else self._described(error, more)
            raise self._error from error

    def _described(self, error: OSError, more: str) -> KVStoreError:
        kind = DeadlineError if isinstance(error, TimeoutError) else WorkerLostError
        return kind(
            f"rank {self._rank} cannot sum gradients with the other workers of its host any more: {error}{more}. Look "
            "for the last words of that worker, and restart the job from its last saved states"
        )


def open_host_sum(client: Client) -> HostSum | None:
    """Find the other workers of this host and share memory with them; collective over all workers.

    None where this worker gives its own gradients: it is alone on its host, or memory cannot be shared there, or all
    workers share that of all servers, which make the same sum.
    """
    options = client.options
    if options.num_workers == 1:
        return None
    said = {"is_near": client.shares_all_memory}
    memory, ranks, heard, trouble = share_memory(
        options.rank, name_host, said, _hosts, client.gather, lambda: client.options.timeout
    )
    if memory is not None:
        return HostSum(memory, options.rank, ranks)
    if trouble and options.rank == ranks[0]:
        _log.warning("workers of one host, %s, give their gradients one by one: %s", ranks, trouble)
    elif not options.rank and not _hosts(heard):
        _log.info(
            "hierarchy=True changes nothing: no two workers share a host, or all share the memory of all servers"
        )
    return None


def _hosts(heard: Heard) -> list[Sequence[int]]:
    """Group the ranks of those hosts that sum."""
    hosts: dict[str, list[int]] = {}
    for rank, one in enumerate(heard):
        hosts.setdefault(one["host"], []).append(rank)
    if len(hosts) == 1 and all(one["is_near"] for one in heard):
        return []
    found = [ranks for ranks in hosts.values() if len(ranks) > 1]
    return [ranks for ranks in found if not any(heard[rank]["trouble"] for rank in ranks)]
