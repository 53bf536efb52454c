"""Synchronise a Trainer over an engine, in this process or on servers: its parameters are one table there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvstore_server.codec import Codec, torch_dtype
from kvstore_server.norms import Decision
from kvstore_server.optimizer import Optimizer, States, spec_for_store
from kvstore_server.plan import Plan, Slice
from kvstore_server.rows import RowSet
from kvtrainer.comm.client import Client
from kvtrainer.comm.compressor import Compressor
from kvtrainer.comm.round import Contribution
from kvtrainer.memory.row_sparse import NO_TABLES, Tables
from kvtrainer.sync.contract import Exchange, Gradients, Outcome, Shadowed

TABLE = "parameters"


class StoreExchange(Exchange):
    """Over a client of an engine, in this process or, if it `is_dist`, on servers.

    Slices are those of the plan that the Trainer made, which differs from the table's in servers only.
    """

    def __init__(
        self,
        client: Client,
        plan: Plan,
        optimizer: Optimizer | None,
        codec: Codec | None = None,
        is_dist: bool = False,
        name: str = TABLE,
    ) -> None:
        self._has_rows = False
        """Whether a gradient of this worker has been row-sparse."""
        self.rank, self.num_workers = client.options.rank, client.options.num_workers
        self.updates_weights = optimizer is not None
        self.is_sync = client.options.mode.is_sync
        self._client = client
        if optimizer is not None:
            client.set_optimizer(spec_for_store(optimizer))
        whole_keys = optimizer is not None and not optimizer.elementwise
        self._name = name
        [self._table] = client.register({name: plan.specs}, whole_keys)
        if codec is not None:
            self._table.compressor = Compressor(codec, self._table.plan)
        if (
            optimizer is None and is_dist
        ):  # also with one worker: a script that works with one works with several
            self.refuses_rows = (
                "which needs update_on_kvstore=True with a dist kvstore: rows that other workers have cannot be summed "
                "here"
            )

    def init(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        mine = _on_cpu(weights)
        self._client.rounds.initialise(self._of_rank_0(mine, tables, mine))
        _copy_back(weights, mine)

    def run(self, grads: Gradients, weights: Mapping[str, Tensor]) -> Outcome:
        """Run one round over the client; see `Exchange.run`."""
        values, target = grads.arenas, weights if self.updates_weights else grads.arenas
        out, is_elsewhere = target, any([not flat.is_cpu for flat in target.values()])
        if is_elsewhere:
            values, out = _on_cpu(values), _on_cpu(target)
        specs = self._table.plan.specs
        # Rows of a single worker are their own sum. The sum of replicas may have come in a wider dtype.
        rows = {
            (0, key): RowSet(ids.cpu(), of_key.to("cpu", torch_dtype(specs[key].dtype)))
            for key, (ids, of_key) in (grads.rows.items() if self.updates_weights else ())
        }
        unsent = frozenset() if self.updates_weights else frozenset(grads.rows)
        # Only rows make it worth the servers' while to know what has changed.
        self._has_rows = self._has_rows or bool(rows)
        contribution = Contribution(
            [self._table], None if grads.veto else [values], [out], grads.scale, grads.hyper, grads.absent | unsent,
            rows, veto=grads.veto, is_kept=self.updates_weights and self._has_rows, guard=grads.guard,
        )  # fmt: skip
        try:
            ticket = self._client.rounds.start(contribution)
            self._client.rounds.wait(ticket)
        except BaseException:
            self._table.forget_held()  # all weights have to come again
            raise
        measured, decision = ticket.decided.get(self._name, (None, Decision()))
        if self._name in ticket.vetoes:
            return Outcome(frozenset(), True, None, measured, decision)
        if is_elsewhere:
            _copy_back(target, out)
        for key in unsent:
            # What came in place of them is the value of a key that was left out, not a sum.
            at = self._table.plan.key_offsets[key]
            grads.arenas[specs[key].dtype][at : at + specs[key].numel].zero_()
        left_out = frozenset(ticket.absent.get(self._name, ())) - unsent
        return Outcome(left_out, False, None, measured, decision)

    def shadow(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Shadowed:
        """Run one round to which this worker gives nothing; see `Exchange.shadow`."""
        target = grads if not self.updates_weights else None if self.is_sync else weights
        out = None if target is None else _on_cpu(target)
        outs = None if out is None else [out]
        ticket = self._client.rounds.start(Contribution([self._table], None, outs, joined=True))
        self._client.rounds.wait(ticket)
        said = ticket.in_force[self._name]
        if target is not None and out is not None:
            _copy_back(target, out)
        if said.is_over and self.updates_weights and self.is_sync:
            mine = _on_cpu(weights)
            self._client.rounds.pull([self._table], [mine])
            _copy_back(weights, mine)
        outcome = Outcome(frozenset(ticket.absent.get(self._name, ())), self._name in ticket.vetoes)
        return Shadowed(outcome, said.hyper, said.is_over)

    def assign(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        """Give every worker and the store rank 0's weights; see `Exchange.assign`."""
        mine = _on_cpu(weights)
        rounds = self._client.rounds
        if self.is_sync:
            try:
                rounds.wait(rounds.start(self._of_rank_0(mine, tables, mine, assign=True)))
            except BaseException:
                self._table.forget_held()
                raise
        else:
            # Contributions count one by one: none may come between, and nobody may read before.
            self._client.barrier()
            if not self.rank:
                rounds.wait(rounds.start(self._of_rank_0(mine, tables, None, assign=True)))
            self._client.barrier()
            rounds.pull([self._table], [mine])
        _copy_back(weights, mine)

    def pull(self) -> dict[str, Tensor]:
        """Fetch the weights that the store has now, laid out by the plan, on the CPU."""
        sizes = self._table.plan.resident_sizes
        held = {dtype: torch.zeros(size, dtype=torch_dtype(dtype)) for dtype, size in sizes.items()}
        self._client.rounds.pull([self._table], [held])
        return held

    def pull_rows(self, key: int, ids: Tensor) -> Tensor:
        """Fetch rows (distinct, ascending ids) of a row-sparse key (by index), flat, on the CPU."""
        [rows] = self._client.rounds.pull_rows([(self._table, key, ids)])
        return rows

    def get_state(self, piece: Slice) -> States:
        return self._client.get_state(self._table, self._table.plan.slices[piece.index])

    def put_state(self, piece: Slice, state: States) -> None:
        self._client.put_state(self._table, self._table.plan.slices[piece.index], state)

    @property
    def version(self) -> int:
        """The number of updates in the weights that came last; -1 if none came yet."""
        return max(self._table.versions.values(), default=-1)

    @property
    def staleness(self) -> int:
        """The number of updates of others between the weights of the last contribution and that."""
        return self._table.staleness

    def residuals(self) -> dict[int, Tensor]:
        """Copy what compression has held back of this worker's gradients, by index of the key."""
        compressor = self._table.compressor
        return {} if compressor is None else compressor.residuals()

    def set_residuals(self, residuals: Mapping[int, Tensor]) -> None:
        """Replace what compression has held back; without compression there is nothing to hold."""
        if self._table.compressor is not None:
            self._table.compressor.set_residuals(residuals)

    def stats(self) -> list[dict[str, Any]]:
        return self._client.stats()

    def _of_rank_0(
        self,
        mine: Mapping[str, Tensor],
        tables: Tables,
        out: Mapping[str, Tensor] | None,
        assign: bool = False,
    ) -> Contribution:
        """Make this worker's part in a round in which rank 0's values count."""
        given = {} if self.rank else {key: make() for key, make in tables.items()}
        is_kept = self.updates_weights and self._has_rows and out is not None
        values, outs = None if self.rank else [mine], None if out is None else [out]
        return Contribution([self._table], values, outs, assign=assign, sources=given, is_kept=is_kept)


def _on_cpu(arenas: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {dtype: flat.detach().to("cpu") for dtype, flat in arenas.items()}


@torch.no_grad()
def _copy_back(arenas: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    for dtype, flat in arenas.items():
        if flat.device.type != "cpu":
            flat.copy_(source[dtype])
