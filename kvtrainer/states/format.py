"""Optimizer state by slice, by parameter and in a file, and the conversions between them.

Stores keep state by slice. `export_states` and `import_states` convert it to and from a dict for each parameter, in the
form of torch's `state_dict`. `SavedStates` has that and everything else that a Trainer needs to resume;
`pack_state_file` and `unpack_state_file` convert it to the contents of a safetensors file: tensors, and JSON with a
checksum.

Which entries an optimizer keeps is found by a trial update of zeros (`trial_state`), so optimizers of users need not
declare them. State that does not fit is refused with a list of all differences before anything is changed.

Invariants: state is stored under parameter names, so it does not depend on the kvstore, the number of servers or the
order of parameters. A file contains numbers, names and tensors, never code. It is written completely or not at all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor

from kvstore_server import check
from kvstore_server.durable.tensor_file import write_tensors
from kvstore_server.optimizer import Optimizer, States
from kvstore_server.optimizer.base import MAX_COUNT
from kvstore_server.optimizer.state import joined, spread_state
from kvstore_server.optimizer.torch_family import OWN_COUNT, UNCOUNTED, TorchOptimizer
from kvstore_server.optimizer.trees import (
    clone_tree,
    decode_tree_entry,
    encode_tree_entry,
    flatten_trees,
    is_composed_tensor,
    unflatten_trees,
)
from kvstore_server.plan import HASH_SLICES, Plan, Slice, TensorSpec, row_numel, slices_of_hashes
from kvstore_server.shard.table_optimizer import table_optimizer, table_optimizer_name
from kvtrainer.common.progress import print_duration, track_progress
from kvtrainer.errors import StateFileError, StateMismatchError
from kvtrainer.states.safetensors_file import Path, open_file, replace_file

State = dict[str, Any]
"""Name → tensor of the parameter's shape (any shape for an optimizer of whole keys), 0-d tensor, plain value, or a
dict, list or tuple of these."""

# Entries that may be missing: options that need them, such as momentum, may change during training.
_OPTIONAL = frozenset({"step", "master", "momentum_buffer", "max_exp_avg_sq", "grad_avg", "last_lr"})
_HALF = ("float16", "bfloat16")

FORMAT = "kvtrainer saved states"
DELTA_FORMAT = "kvtrainer delta of saved states"
"""Of a file that has only changes of hash tables; see `states.delta`."""
VERSION = "1"
_IDENTITY = re.compile("[0-9a-f]{32}")

# First part of a tensor's name: state/<parameter>/<entry> or extra/<section>/<name>, each part quoted.
_STATE, _EXTRA = "state", "extra"


class OptimizerStateHolder(Protocol):
    """Keeps optimizer state by slice, here or on a server."""

    def get_states(self, slices: Sequence[Slice], since: Sequence[int]) -> Iterator[States]:
        """Yield a copy of the state of each slice. `since` has a step for each: see `export_states`."""

    def put_state(self, slice_: Slice, state: States) -> None: ...


class TableMark(NamedTuple):
    """A moment in the life of a hash table. While the histories stay equal, later changes have later steps."""

    step: int
    histories: bytes
    """A digest of the histories of all its slices; see `HashTable.history`."""


def mark_of_table(step: int, histories: Sequence[int]) -> TableMark:
    data = np.array(histories, np.int64).tobytes()
    return TableMark(step, hashlib.blake2b(data, digest_size=16).digest())


def mark_of_loaded(step: int, identity: str) -> TableMark:
    """Return the mark of a table that was loaded from a file, after that many updates."""
    return mark_of_table(step, [history_of_file(identity)] * HASH_SLICES)


def history_of_file(identity: str) -> int:
    """Return the history of slices that come from a file: the same on every worker."""
    return 1 + (int(identity, 16) >> 66)


HISTORY = "slice history"
"""The entry of a hash table's state, on its way to its holder, that becomes the history of all slices."""


def export_states(
    plan: Plan,
    holder: OptimizerStateHolder,
    keys: Sequence[int] | None = None,
    since: Mapping[int, int] | None = None,
    marks: dict[int, TableMark] | None = None,
) -> dict[int, State]:
    """Return a copy of the state of those keys (by index; None: all) that were updated.

    Args:
        since: Hash table (key) → a step; it comes without the rows that were not updated after it, and with the numbers
            of all rows that are there.
        marks: Gets the present moment of each hash table, by key.
    """
    slices = plan.slices if keys is None else [slice_ for key in keys for slice_ in plan.slices_with(key)]
    order, steps = _in_turns(slices), since or {}
    own = [steps.get(slice_.segments[0].key, 0) if slice_.segments else 0 for slice_ in order]
    states_in_order = holder.get_states(order, own)
    kept = {
        slice_.index: next(states_in_order) for slice_ in track_progress(order, "collecting optimizer states")
    }
    found = {}
    nbytes = sum([tensor.nbytes for one in kept.values() for tensor in one.tensors.values()])
    with print_duration("putting optimizer states together", nbytes):
        for key in range(len(plan.specs)) if keys is None else keys:
            parts = _state_segments_of_key(plan, kept, key)
            if parts and plan.specs[key].hash_table is not None:
                # Without rounds of all workers, slices that were fetched one by one may be those after several updates.
                counts = [int(states.steps[0]) for states, _ in parts]
                if marks is not None:
                    marks[key] = mark_of_table(min(counts), [states.history for states, _ in parts])
                step, rows = max(counts), _join_hash_slices([states.entries[0] for states, _ in parts])
                if step or len(rows["rows"]):  # rows may be loaded before the first update
                    found[key] = {**rows, "step": torch.tensor(float(step), device="cpu")}
                continue
            if parts and parts[0][0].steps[parts[0][1]]:
                state: State = joined(parts, plan.specs[key].shape)
                found[key] = {
                    **unflatten_trees(_state_by_row(plan, key, state)),
                    "step": torch.tensor(float(state["step"]), device="cpu"),
                }
    return found


def _in_turns(slices: Iterable[Slice]) -> list[Slice]:
    """Return the slices of servers in turns, so that these work at the same time."""
    by_server: dict[int, list[Slice]] = {}
    for slice_ in slices:
        by_server.setdefault(slice_.server, []).append(slice_)
    turns = itertools.zip_longest(*by_server.values())
    return [one for turn in turns for one in turn if one is not None]


def _state_by_row(plan: Plan, key: int, state: State, is_interleaved: bool = True) -> State:
    """Reorder rows of state from interleaved slices to table order, or back. Leaves other entries as they are."""
    [deal] = plan.rows(key).round_robins
    if deal.is_plain:
        return state
    shape = plan.specs[key].shape
    every = np.arange(shape[0])
    order = torch.from_numpy(deal.places(every) if is_interleaved else deal.rows(every))
    return {
        name: value[order] if isinstance(value, Tensor) and value.shape == shape else value
        for name, value in state.items()
    }


def read_states(
    given: Mapping[int, Mapping[str, Any]],
    options: Mapping[int, Mapping[str, Any]],
    plan: Plan,
    optimizer: Optimizer,
) -> dict[int, State]:
    """Check optimizer state by key (index), and return copies of it for the keys that were updated.

    Args:
        options: Options of every key's group when the state was saved.

    Raises:
        StateMismatchError: The state belongs to another model or another kind of optimizer.
    """
    # 1. Check the form.
    odd = {plan.specs[key].key: one for key, one in given.items() if not _is_state(one)}
    if odd:
        found = next(iter(odd.values()))
        raise StateMismatchError(
            f"the state of {', '.join(map(repr, odd))} must be a dict of entries with a count of updates as its "
            f"'step', but is {found!r:.120}; nothing has changed. Load the states of the same model and the same "
            "optimizer"
        )
    # 2. Convert it to the form of a store.
    states = {
        key: _copy_state(state)
        for key, state in given.items()
        if state
        and (_is_updated_state(state) or (plan.specs[key].hash_table is not None and "rows" in state))
    }
    for key, state in states.items():
        _name_own_state_count(state, given[key], options[key], plan.specs[key], optimizer)
        if plan.specs[key].dtype not in _HALF:
            # The weights were in half precision when it was saved.
            state.pop("master", None)
    # 3. Compare it with what the optimizer keeps.
    if problems := _state_format_problems(states, options, plan.specs, optimizer):
        raise StateMismatchError(
            f"the state does not fit this Trainer, which is unchanged: {'; '.join(problems)}. Load the states of the "
            "same model and the same optimizer"
        )
    return states


def import_states(
    plan: Plan,
    holder: OptimizerStateHolder,
    states: Mapping[int, State],
    optimizer: Optimizer,
    device: torch.device,
    *,
    others_stay: bool = False,
) -> None:
    """Replace the state of every key by `states`, from `read_states`; others lose theirs unless `others_stay`."""
    # 1. Get the state of all slices concerned.
    if others_stay:
        slices = [slice_ for key in states for slice_ in plan.slices_with(key)]
        kept = {
            slice_.index: states
            for slice_, states in zip(slices, holder.get_states(slices, [0] * len(slices)), strict=True)
        }
    else:
        kept = {slice_.index: States.of_slice(slice_, device) for slice_ in plan.slices}
    # 2. Find the entries with one number per element, to tell them from scalars where a key has one element.
    of_scalars = {"master"}
    if optimizer.elementwise and any(not plan.specs[key].shape for key in states):
        # With a trial key of two elements, an entry per element has two.
        trial = flatten_trees(trial_state(optimizer, {}, TensorSpec("", (2,), "float32")) or {})
        of_scalars |= {n for n, value in trial.items() if isinstance(value, Tensor) and value.shape == (2,)}
    # 3. Distribute the entries of each key over its slices.
    states = {key: flatten_trees(state) for key, state in states.items()}
    nbytes = sum(
        [one.nbytes for state in states.values() for one in state.values() if isinstance(one, Tensor)]
    )
    with print_duration("dividing optimizer states", nbytes):
        for key, given in states.items():
            if plan.specs[key].hash_table is not None:
                own = _divide_hash_table(given)
                for (parts, _), entries in zip(_state_segments_of_key(plan, kept, key), own, strict=True):
                    parts.steps[:], parts.entries = int(float(given["step"])), [entries]
                    parts.history = given.get(HISTORY, 0)
                continue
            state = _state_by_row(plan, key, given, is_interleaved=False)
            are_numbers = not plan.specs[key].shape  # a 0-d parameter has 0-d entries per element
            entries = {
                n: v.to(device)
                if isinstance(v, Tensor) and (v.dim() or are_numbers) and n != OWN_COUNT
                else v
                for n, v in state.items()
            }
            per_element = of_scalars
            if optimizer.elementwise and plan.specs[key].shape:
                per_element = {n for n, v in entries.items() if isinstance(v, Tensor) and v.dim()}
            spread_state(_state_segments_of_key(plan, kept, key), entries, per_element)
    # 4. Store the slices.
    for index, state_of_slice in track_progress(list(kept.items()), "giving optimizer states"):
        holder.put_state(plan.slices[index], state_of_slice)


def saved_state_problems(
    saved: SavedStates, specs: Sequence[TensorSpec], optimizer: Optimizer, what: str, here: str
) -> Iterator[str]:
    """Yield how saved states differ from keys and an optimizer.

    Args:
        what, here: Words for the keys and their owner, such as "parameters" of "this Trainer".
    """
    # 1. The optimizer and the names.
    if saved.optimizer["name"] != optimizer.registered_name:
        yield f"the optimizer is {saved.optimizer['name']!r} in the file and {optimizer.registered_name!r} here"
    known = {spec.key: spec.shape for spec in specs}
    if missing := [repr(name) for name in known if name not in saved.parameters]:
        yield f"the file lacks the {what} {', '.join(missing)}"
    if unexpected := [repr(name) for name in saved.parameters if name not in known]:
        yield f"the file has the {what} {', '.join(unexpected)}, which {here} does not have"
    # 2. Shapes, and options of hash tables.
    for spec in specs:
        if (theirs := saved.parameters.get(spec.key)) is not None:
            yield from _parameter_problems(theirs, spec, (saved.optimizer["name"], optimizer.registered_name))
    # 3. Entries, which can be compared only for keys that agree.
    common = {at: saved.parameters[spec.key] for at, spec in enumerate(specs) if spec.key in saved.parameters}
    states = {at: row.state for at, row in common.items() if row.state and row.shape == specs[at].shape}
    options = {at: saved.groups[row.group] for at, row in common.items()}
    yield from _state_format_problems(states, options, specs, optimizer)


_KEPT_OPTIONS = "init", "scale", "seed", "admit_after", "max_norm"
"""Options of a hash table that its rows follow from, which those that are not in a file have, too."""


def _parameter_problems(
    saved: SavedParameter, spec: TensorSpec, optimizers: tuple[str, str | None]
) -> Iterator[str]:
    """`optimizers`: the names of those for all parameters, in the file and here."""
    forms = (
        f"is a hash table with rows of {shape[-1]} elements" if table else f"has shape {list(shape)}"
        for shape, table in ((saved.shape, saved.hash_table), (spec.shape, spec.hash_table))
    )
    their_form, our_form = forms
    if their_form != our_form:
        our_form = our_form if saved.hash_table or spec.hash_table else our_form.removeprefix("has shape ")
        yield f"{spec.key!r} {their_form} in the file and {our_form} here"
    if saved.hash_table is None or spec.hash_table is None:
        return
    theirs, ours = saved.hash_table, spec.hash_table._asdict()
    compared = [(name, theirs.get(name), ours[name]) for name in _KEPT_OPTIONS]
    if theirs.get("max_rows") and ours["max_rows"]:
        compared.append(("evict", theirs.get("evict"), ours["evict"]))
    own = [table_optimizer_name(str(one.get("optimizer", ""))) for one in (theirs, ours)]
    if any(own):
        compared.append(("optimizer", own[0] or optimizers[0], own[1] or optimizers[1]))
    for name, their, our in compared:
        if their != our:
            yield f"hash table {spec.key!r} has {name}={their!r} in the file and {name}={our!r} here"


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and _is_state_count(value.get("step", 0))


def _is_state_count(value: Any) -> bool:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return check.is_number(number) and 0 <= number <= MAX_COUNT // 2 and number == int(number)


def _is_updated_state(state: Mapping[str, Any]) -> bool:
    """Return whether state is more than initial. A master copy without updates only repeats the weights."""
    if "step" in state:
        return float(state["step"]) > 0
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return not tensors or not all(map(_is_negative_zeros_state, tensors))


def _is_negative_zeros_state(value: Tensor) -> bool:
    """Return whether an entry is from an uncounted `initial_state`: all negative zeros, which no update produces."""
    flat = value.flatten()
    return all(bool((part.signbit() & (part == 0)).all()) for part in (flat[:1], flat))


def _state_segments_of_key(plan: Plan, kept: Mapping[int, States], key: int) -> list[tuple[States, int]]:
    return [
        (kept[slice_.index], at)
        for slice_ in plan.slices_with(key)
        for at, segment in enumerate(slice_.segments)
        if segment.key == key
    ]


def _join_hash_slices(slices: Sequence[Mapping[str, Any]]) -> State:
    """Return the rows of a hash table, in the order of their numbers, with all that belongs to them."""
    found: State = {}
    # A server that has no rows yet does not know all entries.
    for name in dict.fromkeys(name for one in slices for name in one):
        first = next(one[name] for one in slices if name in one)
        if not isinstance(first, Tensor) or not first.dim():
            found[name] = first
            continue
        parts = [one.get(name) for one in slices]
        counts = [len(one["candidate rows" if name.startswith("candidate ") else "rows"]) for one in slices]
        found[name] = _concatenated(
            [
                first.new_zeros(count, *first.shape[1:]) if part is None else part
                for part, count in zip(parts, counts, strict=True)
            ]
        )
    return found


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    # Not torch.cat, whose threads meet for each of the parts, which takes ten times as long on a busy machine.
    first = parts[0]
    found = first.new_empty(sum(map(len, parts)), *first.shape[1:])
    if len(found):
        arrays = [part.view(torch.uint8).numpy() for part in parts if len(part)]
        np.concatenate(arrays, out=found.view(torch.uint8).numpy())
    return found


def _divide_hash_table(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the slices of a hash table, the inverse of `_join_hash_slices`."""
    found: list[dict[str, Any]] = [{} for _ in range(HASH_SLICES)]
    lengths = {}
    for begin in ("", "candidate "):
        of_rows = slices_of_hashes(state[f"{begin}rows"].numpy())
        lengths[begin] = np.bincount(of_rows, minlength=HASH_SLICES).tolist()
    for name, value in state.items():
        parts = [value] * HASH_SLICES
        if name == "figures":
            parts = list(torch.split(value, 1))
        elif isinstance(value, Tensor) and value.dim():
            parts = list(torch.split(value, lengths["candidate " if name.startswith("candidate ") else ""]))
        for one, part in zip(found, parts, strict=True) if name not in ("step", HISTORY) else ():
            one[name] = part
    return found


def _hash_table_problem(state: State, spec: TensorSpec) -> str:
    """Return how state differs from that of a hash table; empty if it does not."""
    for begin in ("", "candidate "):
        rows = state.get(f"{begin}rows")
        if not isinstance(rows, Tensor) or rows.dtype is not torch.int64 or rows.dim() != 1:
            return f"state '{begin}rows' of PARAMETERS is not a list of row numbers"
        if bool((rows[1:] <= rows[:-1]).any()):
            return f"state '{begin}rows' of PARAMETERS is not ascending"
        for name, value in state.items():
            is_other = name == "figures" or name.startswith("candidate ") != bool(begin)
            if not is_other and isinstance(value, Tensor) and value.dim() and len(value) != len(rows):
                return f"state {name!r} of PARAMETERS has {len(value)} rows, '{begin}rows' has {len(rows)}"
        step, touched = int(float(state.get("step", 0))), state.get(f"{begin}touched")
        if not isinstance(touched, Tensor) or touched.dtype is not torch.int32:
            return f"state '{begin}touched' of PARAMETERS is not a list of steps"
        if bool(((touched < 1) | (touched > max(step, 1))).any()):
            return f"state '{begin}touched' of PARAMETERS has numbers that are not steps up to {step}"
    weights, figures = state.get("weights"), state.get("figures")
    shape = None if not isinstance(weights, Tensor) else list(weights.shape[1:])
    if shape != list(spec.shape[1:]) or not isinstance(figures, Tensor) or figures.shape != (HASH_SLICES, 3):
        width = shape[0] if shape and len(shape) == 1 else "another number of"
        return f"the rows of PARAMETERS have {width} elements, but {spec.shape[1]} here"
    return ""


def _table_state_problem(state: State, spec: TensorSpec, optimizer: Optimizer) -> str:
    """Return how the optimizer's state of rows differs from what the table's optimizer keeps; empty if it does not."""
    own, _ = table_optimizer(spec.hash_table, optimizer)
    trial = trial_state(own, own.hyper, spec._replace(shape=(1, row_numel(spec))))
    has_decay = spec.hash_table is not None and bool(spec.hash_table.weight_decay)
    if "decayed" in state and not has_decay:
        return "PARAMETERS was saved with weight_decay, and has none here"
    names = {name.removeprefix("state ") for name in state if name.startswith("state ")}
    if trial is not None and names:
        expected = set(flatten_trees(trial))
        for name in sorted((expected ^ names) - _OPTIONAL - {OWN_COUNT}):
            missing = "is missing" if name in expected else f"is not one that {own.registered_name} keeps"
            return f"state {name!r} of PARAMETERS {missing}"
    return ""


def _copy_state(state: Mapping[str, Any]) -> State:
    """Copy state, add a step count if torch keeps none, and drop unused entries."""
    used = {name: value for name, value in state.items() if value is not None and name != "step"}
    return {"step": torch.tensor(float(state.get("step", 1.0)), device="cpu"), **clone_tree(used)}


def _name_own_state_count(
    state: State, given: Mapping[str, Any], options: Mapping[str, Any], spec: TensorSpec, optimizer: Optimizer
) -> None:
    """Store the count of a user's torch class under a separate name, because 'step' may exist only in this form."""
    if OWN_COUNT in given or "step" not in given:
        return
    if isinstance(optimizer, TorchOptimizer) and optimizer.is_foreign:
        found = trial_state(optimizer, options, spec)
        if found is None or OWN_COUNT in found:
            state[OWN_COUNT] = given["step"]


def trial_state(optimizer: Optimizer, options: Mapping[str, Any], spec: TensorSpec) -> State | None:
    """Return the entries of one parameter after an update of zeros with zero gradient, or None if that fails.

    An optimizer of whole keys gets the real shape. Otherwise elements do not affect each other, and two are enough.

    Args:
        options: Options of the parameter's group. The optimizer's own are used for missing ones.
    """
    shape = (2,) if optimizer.elementwise else spec.shape
    weight = torch.zeros(
        shape, dtype=torch.float64 if spec.dtype == "float64" else torch.float32, device="cpu"
    )
    hypers = {name: options.get(name, value) for name, value in optimizer.hyper.items()}
    hyper = {**hypers, "step": 1 + optimizer.begin_num_update, "key": spec.key, "first": 0}
    try:
        state: State = dict(optimizer.create_state(weight))
        with torch.no_grad():
            optimizer.update(weight, torch.zeros_like(weight), state, hyper)
    except Exception:
        # A user's optimizer may refuse zeros. Then its entries are not checked.
        return None
    state = flatten_trees(state)
    for name, value in state.items() if optimizer.elementwise else ():
        if isinstance(value, Tensor) and value.shape == (2,):
            state[name] = value[0].expand(spec.shape)  # takes no memory
    state = unflatten_trees(state)
    return {name: value for name, value in state.items() if value is not None}


def initial_state(optimizer: Optimizer, options: Mapping[str, Any], spec: TensorSpec) -> State:
    """Return entries with a step count of 0 to load into; negative zeros mark them if torch's class keeps no count."""
    is_counted = not isinstance(optimizer, TorchOptimizer) or optimizer.cls not in UNCOUNTED
    state: State = {"step": torch.tensor(0.0, device="cpu")}
    for name, value in flatten_trees(trial_state(optimizer, options, spec) or {}).items():
        state[name] = value
        if isinstance(value, Tensor):
            state[name] = value.detach().clone(memory_format=torch.contiguous_format)
            state[name] = state[name] if is_counted else state[name].fill_(-0.0)
    return unflatten_trees(state)


def _state_format_problems(
    states: Mapping[int, State],
    options: Mapping[int, Mapping[str, Any]],
    specs: Sequence[TensorSpec],
    optimizer: Optimizer,
) -> list[str]:
    """Return one sentence for each kind of difference between state and what the optimizer keeps, by key (index)."""
    found: dict[str, list[str]] = {}
    # Only torch's SGD has a 'dampening'; this tells its momentum from Gluon's.
    is_torch, is_theirs_torch = (
        "dampening" in optimizer.hyper,
        any("dampening" in o for o in options.values()),
    )
    if is_torch != is_theirs_torch and any("momentum_buffer" in state for state in states.values()):
        theirs, mine = ("torch's", "Gluon's") if is_theirs_torch else ("Gluon's", "torch's")
        found[
            f"the state was saved with {theirs} SGD, but {mine} is used here: their momentum differs by a factor of "
            "the learning rate. Use 'sgd' for Gluon's, 'torch:SGD' for torch's"
        ] = []
    for key, state in states.items():
        spec = specs[key]
        if spec.hash_table is not None:
            if problem := _hash_table_problem(state, spec) or _table_state_problem(state, spec, optimizer):
                found.setdefault(problem, []).append(repr(spec.key))
            continue
        trial = trial_state(optimizer, options[key], spec)
        expected = None
        if trial is not None:
            expected = {n: _state_entry_shape(v) for n, v in trial.items()}
        for problem in _state_entry_problems(state, expected, spec, optimizer):
            found.setdefault(problem, []).append(repr(spec.key))
    return [problem.replace("PARAMETERS", ", ".join(names)) for problem, names in found.items()]


def _state_entry_problems(
    state: State,
    expected: Mapping[str, tuple[int, ...] | None] | None,
    spec: TensorSpec,
    optimizer: Optimizer,
) -> Iterable[str]:
    shape = list(spec.shape)
    if expected is not None and spec.numel:
        for name in sorted(expected.keys() - state.keys() - _OPTIONAL):
            yield f"state {name!r} of PARAMETERS is missing"
        for name in sorted(state.keys() - expected.keys() - _OPTIONAL - {OWN_COUNT}):
            yield f"state {name!r} of PARAMETERS is not one that {optimizer.registered_name} keeps"
    known = {**(expected or {}), "master": spec.shape, "step": ()}
    for name, value in flatten_trees(state).items():
        is_tensor = isinstance(value, Tensor)
        if name == "step" and not _is_state_count(value):
            yield f"state 'step' of PARAMETERS is no count of updates, but {value!r:.80}"
            continue
        wanted = known.get(name, spec.shape if is_tensor and value.dim() and optimizer.elementwise else None)
        got = _state_entry_shape(value)
        if wanted is not None and got is not None and got != wanted:
            fits = "the parameter has" if wanted == spec.shape else f"the parameter has {shape} and the entry"
            yield f"state {name!r} of PARAMETERS has shape {list(got)}, {fits} {list(wanted)}"


def _state_entry_shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return () if isinstance(value, int | float) else None


@dataclass(frozen=True)
class SavedParameter:
    """What is saved of a parameter. Its values are not."""

    shape: tuple[int, ...]
    dtype: str
    group: int
    """Index of its group in `SavedStates.groups`."""
    state: dict[str, Any] = field(default_factory=dict)
    """The optimizer's entries by name, including 'step'; empty before the first update."""
    hash_table: Mapping[str, Any] | None = None
    """Of a hash table its options, by name."""


class BaseFile(NamedTuple):
    """The file of saved states that another one has the changes of."""

    name: str
    """Without folders; it is in the folder of the other one."""
    identity: str


@dataclass(frozen=True)
class SavedStates:
    """Everything that a Trainer needs to resume, except the weights."""

    optimizer: dict[str, Any]
    """The result of `Optimizer.spec`."""
    num_update: int
    """The number of updates seen by the learning-rate scheduler."""
    groups: list[dict[str, Any]]
    """Options of every parameter group."""
    parameters: dict[str, SavedParameter]
    """By name."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Plain values of other parts of the Trainer, by part."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Tensors of other parts, by part and by name, such as a parameter's."""
    base: BaseFile | None = None
    """Where the rows of hash tables are that are not here; None: there are none."""
    identity: str = ""
    """Of the file that this was read from, if it has hash tables; not saved again."""
    marks: Mapping[str, TableMark] = field(default_factory=dict)
    """The moment at which each hash table was exported, by name; not saved."""

    @property
    def hash_tables(self) -> list[str]:
        """The names of the parameters that are hash tables."""
        return [name for name, parameter in self.parameters.items() if parameter.hash_table is not None]


def pack_state_file(saved: SavedStates, identity: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Args:
        identity: Of a file with hash tables; empty: a digest of the contents.

    Raises:
        StateFileError: A value is neither a tensor nor plain.
    """
    tensors = {
        _state_tensor_name(_EXTRA, section, name): tensor
        for section, members in saved.tensors.items()
        for name, tensor in members.items()
    }
    # 1. Separate tensors from other entries.
    rows = []
    for name, parameter in saved.parameters.items():
        row = {"name": name, **{part: value for part, value in vars(parameter).items() if value is not None}}
        entries = flatten_trees(row.pop("state"))
        found = {entry: value for entry, value in entries.items() if isinstance(value, Tensor)}
        for entry in [entry for entry, value in found.items() if is_composed_tensor(value)]:
            kind = type(found[entry]).__name__
            raise StateFileError(
                f"the state {entry!r} of {name!r} cannot be saved, because it is of class {kind}, which is made of "
                "several tensors; torch.save can save what state_dict() of the Trainer returns"
            )
        tensors |= {_state_tensor_name(_STATE, name, entry): tensor for entry, tensor in found.items()}
        others = {entry: value for entry, value in entries.items() if entry not in found}
        rows.append(
            {
                **row,
                "numbers": {
                    entry: encode_state_entry(name, entry, one) for entry, one in sorted(others.items())
                },
            }
        )
    # 2. Everything else becomes JSON.
    content = {**vars(saved), "parameters": rows}
    for name in ("tensors", "identity", "marks"):
        del content[name]
    if saved.base is None:
        del content["base"]
    try:
        text = json.dumps(content)
    except (TypeError, ValueError) as error:
        raise StateFileError(
            f"the states hold a value that is neither a tensor nor plain: {error}"
        ) from error
    # 3. The checksum covers both.
    tensors = {name: _storable_state_tensor(tensor) for name, tensor in tensors.items()}
    checks = [*_running_checksums(tensors, text)]
    metadata = {"format": FORMAT if saved.base is None else DELTA_FORMAT, "version": VERSION, "content": text}
    if saved.hash_tables:
        digest = hashlib.blake2b("\n".join([text, *checks]).encode(), digest_size=16)
        metadata["identity"] = identity or digest.hexdigest()
    return tensors, {**metadata, "checksum": checks[-1]}


def encode_state_entry(owner: str, entry: str, value: Any) -> Any:
    try:
        return encode_tree_entry(value)
    except TypeError as error:
        raise StateFileError(
            f"the state {entry!r} of {owner!r} cannot be saved, because {error}; keep tensors, plain values, and "
            "dicts, lists and tuples of these there"
        ) from error


def checksum_of_state_file(tensors: Mapping[str, Tensor], text: str) -> str:
    """Return a CRC-32 over the text and every tensor with its name, dtype and shape. Also used by other files."""
    return [*_running_checksums(tensors, text)][-1]


def _running_checksums(tensors: Mapping[str, Tensor], text: str) -> Iterator[str]:
    value = zlib.crc32(text.encode())
    yield f"{value:08x}"
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), value)
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        value = zlib.crc32(plain.view(-1).view(torch.uint8).numpy().data, value)
        yield f"{value:08x}"


def check_state_file_metadata(metadata: Mapping[str, str]) -> None:
    if metadata.get("format") not in (FORMAT, DELTA_FORMAT):
        raise StateFileError("it is a safetensors file, but of something else: save_states did not write it")
    if metadata.get("version") != VERSION:
        raise StateFileError(
            f"it has version {metadata.get('version')!r} of the format, this kvtrainer reads {VERSION!r}; update "
            "kvtrainer"
        )


def unpack_state_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedStates:
    """Restore what `pack_state_file` returned.

    Raises:
        StateFileError: It is something else, written by a newer release, or damaged.
    """
    check_state_file_metadata(metadata)
    text = metadata.get("content", "")
    if metadata.get("checksum") != checksum_of_state_file(tensors, text):
        raise StateFileError(
            "its contents do not have the checksum that was saved with them, so it was damaged since"
        )
    return _decode_state_content(tensors, metadata)


def _decode_state_content(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> SavedStates:
    try:
        return _decode_saved_states(tensors, json.loads(metadata.get("content", "")))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise StateFileError(f"its description makes no sense ({type(error).__name__}: {error})") from error


def _decode_saved_states(tensors: Mapping[str, Tensor], content: Any) -> SavedStates:
    parameters = {
        row["name"]: {
            **row,
            "state": {name: decode_tree_entry(value) for name, value in row["numbers"].items()},
        }
        for row in content["parameters"]
    }
    sections: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        kind, owner, name = map(unquote, full_name.split("/"))
        members = parameters[owner]["state"] if kind == _STATE else sections.setdefault(owner, {})
        members[name] = tensor
    for parameter in parameters.values():
        parameter["state"] = unflatten_trees(parameter["state"])
    return build_saved_states({**content, "parameters": parameters, "tensors": sections})


def build_saved_states(content: Mapping[str, Any]) -> SavedStates:
    """Build saved states from plain dicts. Raises KeyError, TypeError, ValueError or AttributeError."""
    parameters = {
        name: SavedParameter(
            tuple(map(int, one["shape"])),
            str(one["dtype"]),
            int(one["group"]),
            dict(one["state"]),
            None if one.get("hash_table") is None else dict(one["hash_table"]),
        )
        for name, one in content["parameters"].items()
    }
    optimizer = dict(content["optimizer"])
    # JSON has no tuples, but options such as `betas` are tuples.
    groups = [
        {name: _state_lists_to_tuples(value) for name, value in group.items()} for group in content["groups"]
    ]
    if not isinstance(optimizer["name"], str):
        raise ValueError(f"the optimizer is called {optimizer['name']!r}")
    for name, parameter in parameters.items():
        if not 0 <= parameter.group < len(groups):
            raise ValueError(f"{name!r} is in group {parameter.group} of {len(groups)}")
    tensors = {part: dict(members) for part, members in content["tensors"].items()}
    base = content.get("base")
    return SavedStates(
        optimizer,
        int(content["num_update"]),
        groups,
        parameters,
        dict(content["extra"]),
        tensors,
        None if base is None else BaseFile(*map(str, base)),
    )


def _state_tensor_name(*parts: str) -> str:
    return "/".join(quote(part, safe=" ") for part in parts)


def _storable_state_tensor(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    # Parameters may share scalars, but a file must not contain shared memory.
    return tensor.clone() if tensor.dim() == 0 else tensor


def _state_lists_to_tuples(value: Any) -> Any:
    return tuple(map(_state_lists_to_tuples, value)) if isinstance(value, list) else value


def write_state_file(fname: Path, saved: SavedStates, identity: str = "") -> str:
    """Write a file, atomically replacing an existing one. Blocks until it is on the disk.

    Returns its identity, which is given if the file takes the place of another one; empty without hash tables.

    Equal states give equal bytes. Raises StateFileError as `replace_file`.
    """
    tensors, metadata = pack_state_file(saved, identity)
    nbytes = sum([one.nbytes for one in tensors.values()])
    with replace_file(fname, "save states to", nbytes) as file:
        write_tensors(file, tensors, metadata)
    return metadata.get("identity", "")


def read_state_file(
    fname: Path, takes_delta: bool = False, entries: Collection[str] | None = None
) -> SavedStates:
    """Read a file that `write_state_file` wrote.

    Args:
        takes_delta: Whether it may have only changes of hash tables.
        entries: Which entries of state to read; the others come without rows, and the checksum is not verified. None:
            all, verified.

    Raises:
        StateFileError: It is missing, unreadable, truncated, damaged or of another kind. The message says which.
    """
    with open_file(fname, "load states from") as opened:
        metadata = opened.metadata() or {}
        check_state_file_metadata(metadata)
        names = list(opened.keys())
        if entries is None:
            saved = unpack_state_file({name: opened.get_tensor(name) for name in names}, metadata)
        else:
            saved = _decode_state_content(_read_entries(opened, names, entries), metadata)
        if saved.base is not None and not takes_delta:
            raise StateFileError("it has only what has changed in hash tables; load it into a Trainer")
        identity = metadata.get("identity", "")
        if identity and not _IDENTITY.fullmatch(identity):
            raise StateFileError(f"its identity is {identity!r:.80}, so it was damaged since")
        return replace(saved, identity=identity)


def _read_entries(opened: Any, names: Iterable[str], entries: Collection[str]) -> dict[str, Tensor]:
    """Read some entries of an open file. Others get no rows."""
    found = {}
    for name in names:
        is_read = unquote(name.rpartition("/")[2]) in entries or not opened.get_slice(name).get_shape()
        found[name] = opened.get_tensor(name) if is_read else opened.get_slice(name)[:0]
    return found
