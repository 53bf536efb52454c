"""Parameter groups that a script has edited: check them, and name their parameters.

`param_groups` is a public list of dicts, which torch's optimizers read in every step. Finetuning callbacks append
parameters to a group, densification of point clouds replaces them, and other code moves or removes them. A Trainer
keeps parameters in flat memory, so it compares the lists with its layout and, where they differ, lays everything out
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvtrainer.errors import ConfigurationError
from kvtrainer.memory.row_sparse import is_row_sparse
from kvtrainer.trainer.groups import (
    NamedParameters,
    ParameterGroups,
    group_with_checked_options,
    named_group_members,
    unused_number,
)
from kvtrainer.types import Group


def read_edited(groups: ParameterGroups) -> list[Group]:
    """Return what each of the edited groups must contain: "params", "param_names", and missing options.

    A known parameter keeps its name. One that replaces another, which is in no group any more, takes its name. Any
    other gets the name that the script gives it, or an unused number.
    """
    options, members = [], []
    for at, group in enumerate(groups.live):
        if not isinstance(group, dict) or "params" not in group:
            raise ConfigurationError(
                f"parameter group {at} no longer has a list of 'params'; add one, or remove the group from param_groups"
            )
        missing = groups.is_new(group) and groups.defaults.keys() - group.keys()
        options.append(_edited_group_with_defaults(group, groups) if missing else {})
        params = group["params"]
        members.append(named_group_members([params] if isinstance(params, Tensor) else params))
    # Nothing has been changed so far, so a refused edit can be corrected.
    _check_edited_members(groups, [list(given.parameters) for given in members])
    names = _names_of_edited_groups(groups, members)
    return [
        {**own, "params": list(given.parameters), "param_names": called}
        for own, given, called in zip(options, members, names, strict=True)
    ]


def _edited_group_with_defaults(group: Group, groups: ParameterGroups) -> Group:
    given = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    return {**groups.defaults, **group_with_checked_options(given, groups.optimizer)}


def _check_edited_members(groups: ParameterGroups, members: Sequence[Sequence[Any]]) -> None:
    former = {id(p): p for own in groups.trained for p in own}
    seen: dict[int, int] = {}
    for at, own in enumerate(members):
        for p in own:
            if not isinstance(p, Tensor) or not p.is_leaf:
                what = "a computation's result" if isinstance(p, Tensor) else f"a {type(p).__name__}"
                raise ConfigurationError(
                    f"parameter group {at} was given {what} as a parameter; only leaf tensors can be trained"
                )
            if id(p) in seen:
                raise ConfigurationError(
                    f"a parameter of shape {list(p.shape)} is in the parameter groups twice, in group {seen[id(p)]} "
                    f"and in group {at}; remove one of them"
                )
            seen[id(p)] = at
    if not seen:
        raise ConfigurationError(
            "the parameter groups no longer have any parameters, so there is nothing to train"
        )
    changed = former.keys() ^ seen.keys()
    if any(is_row_sparse(p) for own in (*groups.trained, *members) for p in own if id(p) in changed):
        raise ConfigurationError(
            "row-sparse parameters determine the Trainer's store, so they cannot be added to or removed from parameter "
            "groups; restore the groups, or build a new Trainer"
        )


def _names_of_edited_groups(groups: ParameterGroups, members: Sequence[NamedParameters]) -> list[list[str]]:
    # 1. Names of parameters that are still there.
    rows = zip(groups.names, groups.trained, strict=True)
    kept = {id(p): name for names, own in rows for name, p in zip(names, own, strict=True)}
    present = {id(p) for given in members for p in given.parameters}
    taken = {name for at, name in kept.items() if at in present}
    count = len(kept)
    found: list[list[str]] = []
    for at, (own_names, given, _) in enumerate(members):
        # 2. "param_names" counts if the script has kept it in step with "params".
        listed = groups.live[at].get("param_names", ())
        if len(listed) != len(given):
            listed = groups.names[at] if at < len(groups.names) else ()
        called = []
        for place, p in enumerate(given):
            name = kept.get(id(p))
            if name is None:
                # 3. A new parameter: its given name, else that of the one it replaces, else a number.
                wanted = own_names[place]
                if wanted in taken:
                    raise ConfigurationError(
                        f"two parameters have the name {wanted!r}; give each a different name"
                    )
                if wanted is None and place < len(listed) and str(listed[place]) not in taken:
                    wanted = str(listed[place])
                name = unused_number(count, taken) if wanted is None else wanted
                taken.add(name)
            called.append(name)
        found.append(called)
    return found
