"""The files on which a Trainer can save deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.states.delta import BaseRows
from kvtrainer.states.format import SavedStates, TableMark, mark_of_loaded
from kvtrainer.states.safetensors_file import Path
from kvtrainer.trainer.saving import export_trainer_states
from kvtrainer.trainer.step import StepPipeline


class Bases:
    """What a Trainer knows of the files that it has saved since it loaded states, and of the one that it has loaded.

    A file is one with which its hash tables agree but for updates since then. The tables themselves tell whether there
    was anything else than updates (`TableMark`).
    """

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, TableMark]] = {}
        """Identity → the moment at which each hash table was saved, by name."""

    def remember_saved(self, saved: SavedStates, identity: str) -> None:
        """Remember what was saved, in a file of this identity; empty: one without hash tables."""
        if identity:
            self._known[identity] = saved.marks

    def remember_loaded(self, saved: SavedStates) -> None:
        """Remember the file from which states were loaded, if they come from one."""
        if saved.identity:
            self._known[saved.identity] = {
                name: mark_of_loaded(int(state["step"]), saved.identity)
                for name in saved.hash_tables
                if (state := saved.parameters[name].state)
            }

    def forget(self) -> None:
        """Forget all files, because another one is loaded: it may have rows that were saved in one of them."""
        self._known.clear()

    def export_delta(self, pipeline: StepPipeline, base: Path, fname: Path) -> SavedStates:
        """Return what a file has that is saved as `fname` with a base. Blocks while state is fetched.

        Raises:
            ConfigurationError: There is no hash table, or the base is in another folder.
            StateFileError: The base cannot be read.
            StateMismatchError: There can be no delta since this base; says why.
        """
        if not any(spec.hash_table is not None for spec in pipeline.memory.plan.specs):
            raise ConfigurationError(
                "a delta has the changes of hash tables (kvtrainer.Embedding), and this Trainer has none; save "
                "without base"
            )
        rows = BaseRows(base)
        rows.check_target(fname)
        marks = self._known.get(rows.identity)
        if marks is None:
            raise StateMismatchError(
                f"this Trainer has not saved {rows.fname!r} since it loaded states, nor loaded it last, so it does not "
                "know what has changed since; save on the worker that has saved the base, or without base"
            )
        # 1. A table that had no rows yet is saved in full.
        since = {name: mark for name, mark in marks.items() if mark.step and rows.has_rows(name)}
        saved = export_trainer_states(pipeline, {name: mark.step for name, mark in since.items()})
        # 2. The changes of the others.
        parameters = dict(saved.parameters)
        for name in since.keys() & parameters.keys():
            now = saved.marks.get(name)
            if now is None or now.histories != since[name].histories:
                raise rows.no_delta(name)
            one = parameters[name]
            parameters[name] = replace(one, state=rows.delta_of(name, one.state))
        return replace(saved, parameters=parameters, base=rows.described())
