"""Hierarchical summation: workers of one host sum their gradients in memory, and the lowest rank pushes the sum.

The lowest rank also receives the new weights and broadcasts them. The others join the round with an empty contribution
and request nothing. Servers treat that like any other contribution, so rounds end, are repeated or fail as usual.

Before each round the workers of a host compare what they are about to push. If that differs, or is more than dense
gradients, each pushes its own as without the option. So a sum is a left fold in rank order within a host, and then over
hosts in the order of their lowest ranks.
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
from kvtrainer.client.round import Round
from kvtrainer.common.env import name_host
from kvtrainer.ranks.shared_memory import Heard, RankMemory, share_memory

_log = logging.getLogger(__name__)

# The log reports that the option has no effect after this many separate rounds in a row.
_SEPARATE = 20
# A rank's contribution: whether it is only dense gradients, a digest of its absent keys, its factor.
_TERMS = struct.Struct("<?16sd")


class HierarchicalReduce:
    """The workers of this host that sum before one pushes. Used by one thread of each; unusable after an error."""

    def __init__(self, memory: RankMemory, rank: int, ranks: Sequence[int]) -> None:
        self._memory = memory
        self._rank, self._ranks = rank, ranks
        self._is_leader = rank == ranks[0]
        # On the lowest rank: dtype name → the last sum.
        self._sums: dict[str, Tensor] = {}
        # Whether this round is pushed by one worker for all.
        self._is_joint = False
        # Number of separate rounds in a row.
        self._separate = 0
        self._error: KVStoreError | None = None

    def before(self, own: Contribution) -> Contribution:
        """Return the contribution that replaces this worker's, after summing if the workers of the host agree.

        The result must not change before the round has ended. Blocks until all workers of the host are here.

        Raises:
            WorkerLostError: A worker of the host has ended or left.
            DeadlineError: A worker did not arrive in time.
            ProtocolError: A worker made a different call.
        """
        with self._noting_errors():
            terms = self._terms_of_all(own)
            is_common = len({scale for _, _, scale in terms}) == 1
            # Residuals of a compression belong to unscaled gradients, so they need equal factors.
            can_differ = is_common or own.tables[0].compressor is None
            self._is_joint = can_differ and all(one[:2] == (True, terms[0][1]) for one in terms)
            self._count(terms)
            if not self._is_joint:
                return own
            assert own.values is not None
            # Different factors are applied before the sum.
            factor = 1.0 if is_common or own.rescale is None else own.rescale
            rescale = own.rescale if is_common else 1.0
            for dtype, flat in own.values[0].items():
                self._memory.sum([(flat, self._place(dtype, flat))], flat.dtype, factor, for_all=False)
        if not self._is_leader:
            return own._replace(values=None, outs=None, rescale=rescale)
        return own._replace(values=[self._sums], rescale=rescale)

    def after(self, own: Contribution, round_: Round) -> None:
        """Broadcast the new weights of an applied round to this host. If it raises, weights may be of two rounds."""
        if not self._is_joint or round_.vetoes or own.outs is None:
            return
        with self._noting_errors("; the weights here may be of two rounds"):
            for flat in own.outs[0].values():
                self._memory.broadcast(flat)
        for server_request in round_.server_requests if not self._is_leader else ():
            for at, version in server_request.applied.items():
                server_request.layout.tables[at].record_version(server_request.server, version)

    def close(self) -> None:
        self._memory.close()

    def _terms_of_all(self, own: Contribution) -> list[tuple[bool, bytes, float]]:
        is_special = own.rows or own.sources or own.borrowed or own.unread or own.veto or own.assign
        is_plain = own.values is not None and not (is_special or own.joined or own.is_incremental)
        absent = torch.tensor(sorted(own.absent), dtype=torch.int64, device="cpu").numpy().tobytes()
        digest = blake2b(absent, digest_size=16).digest()
        mine = _TERMS.pack(is_plain, digest, 1.0 if own.rescale is None else own.rescale)
        heard = self._memory.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [_TERMS.unpack(one.numpy().tobytes()) for one in heard]

    def _count(self, terms: Sequence[tuple[bool, bytes, float]]) -> None:
        self._separate = 0 if self._is_joint else self._separate + 1
        if self._separate == _SEPARATE and self._is_leader:
            special = [str(rank) for rank, one in zip(self._ranks, terms, strict=True) if not one[0]]
            why = f"the contributions of rank {', '.join(special)} were not dense gradients only"
            if not special:
                why = "they had different parameters, or different batch sizes with compression"
            _log.warning(
                "hierarchy=True has had no effect on this host in the last %d steps, because its workers pushed their "
                "gradients separately: %s",
                _SEPARATE,
                why,
            )

    def takes(self, plan: Plan) -> bool:
        """Return whether gradients in this layout are summed by host. Warns if not."""
        halves = [spec.key for spec in plan.specs if SIZES[spec.dtype] < SIZES["float32"]]
        if halves and self._is_leader:
            _log.warning(
                "hierarchy=True has no effect: %r is in half precision, and its sum would be sent in float32",
                halves[0],
            )
        return not halves

    def _place(self, dtype: str, like: Tensor) -> Tensor:
        if not self._is_leader:
            return like
        known = self._sums.get(dtype)
        if known is None or known.shape != like.shape:
            known = self._sums[dtype] = torch.empty_like(like)
        return known

    @contextmanager
    def _noting_errors(self, more: str = "") -> Iterator[None]:
        """Convert system errors to this project's. An error is raised again in all later rounds."""
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
            f"rank {self._rank} can no longer sum gradients with the other workers of its host: {error}{more}. Look at "
            "the last lines of that worker's log, and restart the job from its last saved states"
        )


def open_host_sum(client: Client) -> HierarchicalReduce | None:
    """Share memory with the other workers of this host. Collective over all workers of the job.

    Returns None if this worker pushes its own gradients: it is alone on its host, memory cannot be shared, or all
    workers share memory with all servers, which compute the same sum.
    """
    options = client.options
    if options.num_workers == 1:
        return None
    said = {"is_near": client.shares_all_memory}
    memory, ranks, heard, trouble = share_memory(
        options.rank, name_host, said, _ranks_by_host, client.gather, lambda: client.options.timeout
    )
    if memory is not None:
        return HierarchicalReduce(memory, options.rank, ranks)
    if trouble and options.rank == ranks[0]:
        _log.warning("workers of one host, %s, push their gradients separately: %s", ranks, trouble)
    elif not options.rank and not _ranks_by_host(heard):
        _log.info(
            "hierarchy=True changes nothing: no workers share a host, or all share memory with all servers"
        )
    return None


def _ranks_by_host(heard: Heard) -> list[Sequence[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, one in enumerate(heard):
        hosts.setdefault(one["host"], []).append(rank)
    if len(hosts) == 1 and all(one["is_near"] for one in heard):
        return []
    found = [ranks for ranks in hosts.values() if len(ranks) > 1]
    return [ranks for ranks in found if not any(heard[rank]["trouble"] for rank in ranks)]
