"""A Trainer's parameters in their places: names, plan, arena and gradient tracker, made together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvtrainer.arena import Arena
from kvtrainer.errors import ConfigurationError
from kvtrainer.gradients import GradientTracker
from kvtrainer.parameters import Group


@dataclass(frozen=True)
class Layout:
    """The parameters of all groups in order; position i is key i of the plan, the arena and the tracker."""

    names: list[str]
    parameters: list[Parameter]
    plan: Plan
    arena: Arena
    tracker: GradientTracker

    def gather_grads(self, present: Sequence[bool]) -> None:
        """Copy the gradients of the parameters that are `present` into the arena.

        Raises:
            ParameterMovedError: the data of a parameter were replaced.
            ConfigurationError: a gradient is sparse.
        """
        self.arena.check_in_place()
        try:
            self.arena.gather_grads(present)
        except RuntimeError:
            # Looked for only now, because looking at every gradient in every step takes time.
            rows = zip(self.names, self.parameters, strict=True)
            sparse = [
                repr(name) for name, p in rows if p.grad is not None and p.grad.layout is not torch.strided
            ]
            if sparse:
                raise ConfigurationError(
                    f"the gradient of {', '.join(sparse)} is sparse; this Trainer takes dense gradients only, so build "
                    "the module with sparse=False"
                ) from None
            raise


def lay_out(groups: Sequence[Group], names: Sequence[Sequence[str]]) -> Layout:
    """Move the parameters of `groups`, called by `names`, into an arena and watch their gradients.

    Raises:
        ConfigurationError: a parameter cannot be stored; nothing has been changed then.
    """
    flat_names = [name for of_group in names for name in of_group]
    parameters = [p for group in groups for p in group["params"]]
    group_of = [at for at, group in enumerate(groups) for _ in group["params"]]
    specs = [
        TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), at)
        for name, p, at in zip(flat_names, parameters, group_of, strict=True)
    ]
    plan = make_plan(specs, 1)
    arena = Arena(parameters, flat_names, plan)
    tracker = GradientTracker(parameters, flat_names)
    tracker.attach()
    return Layout(flat_names, parameters, plan, arena, tracker)
