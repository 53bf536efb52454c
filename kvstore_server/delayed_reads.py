"""The weights that each rank has read, for optimizers that make up for what others have changed since."""

from __future__ import annotations

from torch import Tensor

from kvstore_server.dense import DenseTable


class DelayedReads:
    """A copy of the weights for each rank, as of when they were last sent to it.

    A delay-compensated optimizer keeps in its state the weights that a gradient was computed with. Where ranks
    contribute by themselves these are other ones for each rank (Zheng et al., Asynchronous SGD with Delay Compensation,
    2017). Costs the memory of one copy of the table for each rank.
    """

    def __init__(self, table: DenseTable) -> None:
        self._table = table
        self._read: dict[int, list[Tensor]] = {}

    def note(self, rank: int) -> None:
        """The present weights are sent to a rank."""
        self._read[rank] = [self._table.visible(piece.index).clone() for piece in self._table.slices]

    def note_all(self, num_workers: int) -> None:
        """The present weights are those that every rank has."""
        self.note(0)
        self._read = dict.fromkeys(range(num_workers), self._read[0])

    def restore(self, rank: int, name: str) -> None:
        """Put what a rank has read in place of the state of that name; where there is none yet, nothing has changed."""
        read = self._read.get(rank)
        if read is None:
            return
        for at, state in enumerate(self._table.states):
            kept = state.tensors.get(name)
            if kept is not None:
                kept[: len(read[at])].copy_(read[at])
