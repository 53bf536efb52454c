"""What the parts of the simulation have in common: sizes, tables, and where a process stands with a table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvstore_server.modes import SYNCHRONOUS, Mode
from kvstore_server.norms import Decision
from kvstore_server.plan import Plan, TensorSpec
from kvtrainer.comm.compressor import Compressor
from tests.support import said as m

NUM_WORKERS = 3
NUM_SERVERS = 2
NAMESPACE = "sim"
TIMEOUT = 30.0
DEAD_AFTER = 20.0
REPEAT = 0.3
"""How often a lane that waits asks again when it is its turn."""
TABLES: tuple[tuple[str, tuple[TensorSpec, ...]], ...] = (
    (
        "a",
        (
            TensorSpec("w", (8, 4), "float32"),
            TensorSpec("b", (3,), "float32"),
            TensorSpec("c", (16,), "float32"),
        ),
    ),
    ("b", (TensorSpec("x", (16,), "float32"), TensorSpec("y", (7,), "float32"))),
)
COMPRESSED = 1
"""The table whose gradients are compressed, where any are."""
BY_ROWS = 0
"""The table of which some gradients are row-sparse, where any are."""
NEVER = 1 << 30


@dataclass
class Lane:
    """One table as one process drives it."""

    table: int
    plan: Plan
    numbers: dict[int, int] = field(default_factory=dict)
    """Server → the table's number there."""
    next_rounds: dict[int, int] = field(default_factory=dict)
    round: int = 0
    is_open: bool = False
    generations: dict[int, int] = field(default_factory=dict)
    to_push: list[int] = field(default_factory=list)
    to_commit: list[int] = field(default_factory=list)
    requests: dict[int, int] = field(default_factory=dict)
    """Server → the number of the commit sent there."""
    accepted: set[int] = field(default_factory=set)
    """Servers that said that the commit counts."""
    done: set[int] = field(default_factory=set)
    given_up: bool = False
    is_undoing: bool = False
    """Whether the aborts ask for the round to be taken back, because a server has failed it."""
    aborts: dict[int, int] = field(default_factory=dict)
    """Server → the number of the abort that it has not acknowledged."""
    kept: set[int] = field(default_factory=set)
    """Servers that keep the round as applied although this process gave it up."""
    log: dict[int, str] = field(default_factory=dict)
    """Round → 'done', 'failed', 'kept' (given up, but it stands) or 'apart', as this process saw it."""
    compressor: Compressor | None = None
    """The real one; None where this process sends its gradients as they are."""
    encoded: dict[int, torch.Tensor] = field(default_factory=dict)
    """The slices of the open round as they are sent, where they are compressed."""
    veto: bool = False
    assign: bool = False
    """What this process says of the open round."""
    vetoed: set[int] = field(default_factory=set)
    """Servers that said that the round was vetoed."""
    joins_at: int = NEVER
    """The round from which on this process has no more data."""
    joined: bool = False
    """Whether it says so in the open round."""
    overs: set[int] = field(default_factory=set)
    """Servers that said that all ranks have joined."""
    empty: set[int] = field(default_factory=set)
    """The rounds that this process vetoed, or in which it had no more data."""
    hold: float = 0.0
    """The type of norm that this process wants of the open round; 0 for none."""
    held: dict[int, m.Held] = field(default_factory=dict)
    """Server → what it said about a sum that it holds."""
    decision: Decision | None = None
    to_resolve: list[int] = field(default_factory=list)
    """Servers that are yet to be told the decision, the next one last."""
    was_vetoed: bool = False
    """Whether a rank has vetoed the open round, so that nothing was held."""


@dataclass(frozen=True)
class SimOptions:
    """What all processes of one schedule have in common."""

    optimizer: bytes
    codec: bytes
    """How gradients of one table are compressed; empty where they are not."""
    assigns: int
    """The round in which rank 0's values replace the weights; 0: in none."""
    mode: Mode = SYNCHRONOUS
    hypers: tuple[bytes, ...] = ()
    """The hyper-parameters before and from `hyper_changes` on; none are sent where there are none."""
    hyper_changes: int = NEVER
    joins: tuple[int, ...] = ()
    """How many rounds each rank has data for, between the rounds in which all have joined; empty: for any number."""
    by_rows: frozenset[int] = frozenset()
    """The slices of one table whose gradients are row-sparse now and then."""
    hold: float = 0.0
    """The type of norm that is wanted of every gradient; 0 for none."""
    integers: bool = False
    """Whether values are small integers."""

    def hyper(self, round_: int) -> bytes:
        """The hyper-parameters that everybody who has data believes in."""
        return self.hypers[round_ >= self.hyper_changes] if self.hypers else b""
