"""Which optimizer and which hyper-parameters hold for a round, agreed between the ranks.

Each rank says what it believes; the lowest rank's belief is in force and a rank that disagrees is named. A rank
sends its hyper-parameters only when they change, so the last ones it sent stay its belief.

The hyper-parameters of a table travel as msgpack of {"groups": [{name: number, …}, …], "lr_mult": {key index:
factor}, "wd_mult": {…}, "update_on_kvstore": …}; a key without a factor has 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvstore_server.errors import ConfigurationError, PlanMismatchError
from kvstore_server.optimizer import Optimizer, create_from_spec
from kvstore_server.plan import Plan
from kvstore_server.protocol.control import pack_control, unpack_control


class OptimizerBelief:
    """The optimizer of one namespace, as each rank named it."""

    def __init__(self) -> None:
        self._specs: dict[int, bytes] = {}
        self._built: tuple[bytes, Optimizer] | None = None

    def set(
        self, rank: int, spec: bytes, accept: Callable[[Optimizer], None] = lambda optimizer: None
    ) -> str | None:
        """Note a rank's belief; return the name of the optimizer that a different one replaces, if any.

        A new one is shown to `accept` first, which may raise.

        Raises:
            UnknownNameError: no optimizer of that name is registered here.
            ConfigurationError: the numbers are not valid for it.
        """
        before = self._built[1] if self._built is not None else None
        if self._built is None or self._built[0] != spec:
            values = unpack_control(spec)
            if not isinstance(values, dict) or "name" not in values:
                raise ConfigurationError(f"an optimizer travels as a map with a name, got {values!r:.80}")
            built = create_from_spec(_tuples(values))
            accept(built)
            self._built = (spec, built)
        self._specs[rank] = spec
        assert self._built is not None
        changed = before is not None and before.spec()["name"] != self._built[1].spec()["name"]
        return str(before.spec()["name"]) if changed and before is not None else None

    @property
    def named(self) -> Optimizer | None:
        """The optimizer that was named last; None when no rank has named one."""
        return None if self._built is None else self._built[1]

    def agreed(self, is_sync: bool = True) -> Optimizer | None:
        """The optimizer in force, with the lowest rank's numbers; None when no rank has set one.

        Without synchronous rounds ranks change its numbers at moments of their own, so only its name must be the same.

        Raises:
            PlanMismatchError: two ranks set different ones.
        """
        if self._built is None:
            return None
        lowest = min(self._specs)
        reference = self._specs[lowest]
        if self._built[0] != reference:
            self._built = (reference, create_from_spec(_tuples(unpack_control(reference))))
        for rank, spec in sorted(self._specs.items()):
            if spec != reference and (is_sync or _name_of(spec) != _name_of(reference)):
                raise PlanMismatchError(
                    f"ranks set different optimizers: "
                    f"{_spec_difference(unpack_control(reference), unpack_control(spec), lowest, rank)}; "
                    "set the same one on every worker"
                )
        return self._built[1]


class HyperBelief:
    """The hyper-parameters of one table, as each rank last sent them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sent: dict[int, bytes] = {}
        self._cached: tuple[bytes, float | None, Optimizer, list[Mapping[str, Any]]] | None = None

    def check(self, packed: bytes) -> None:
        """Raise ConfigurationError if the bytes are not hyper-parameters of this table."""
        if packed not in self._sent.values():
            _check(unpack_control(packed), self._plan)

    def set(self, rank: int, packed: bytes) -> None:
        """Note what a rank sent with its commit, after `check`."""
        self._sent[rank] = packed

    def effective(
        self, optimizer: Optimizer, packed: bytes, rate: float | None = None
    ) -> list[Mapping[str, Any]]:
        """The effective hyper-parameters of each key, multipliers applied.

        Args:
            packed: Those of the table, as `common` or `lowest` returns them.
            rate: The learning rate of all groups, where a scheduler decides it.

        Raises:
            ConfigurationError: the optimizer cannot update one of the keys.
        """
        cached = self._cached
        # The optimizer itself is kept, not its id: a new one may get the address of one that is gone.
        if cached is None or cached[:2] != (packed, rate) or cached[2] is not optimizer:
            values: dict[str, Any] = unpack_hypers(packed) if packed else {"groups": None}
            if rate is not None:
                values["groups"] = [{**group, "lr": rate} for group in values["groups"] or [optimizer.hyper]]
            rows = effective_hypers(self._plan, optimizer, values)
            for spec, row in zip(self._plan.specs, rows, strict=True):
                optimizer.check_key(spec.key, spec.shape, row)
            cached = self._cached = (packed, rate, optimizer, rows)
        return cached[3]

    def forget(self, rank: int) -> None:
        """A rank is gone, or another process stands for it, which will say what it believes."""
        self._sent.pop(rank, None)

    def lowest(self, without: Collection[int] = ()) -> bytes:
        """What the lowest rank sent that sent any, packed, some ranks aside; empty when none has."""
        senders = [rank for rank in self._sent if rank not in without] or list(self._sent)
        return self._sent[min(senders)] if senders else b""

    def common(self, ranks: Collection[int]) -> bytes:
        """What these ranks sent, packed; empty when none of them has sent any.

        Raises:
            PlanMismatchError: two of them disagree on a number.
        """
        sent = {rank: packed for rank, packed in self._sent.items() if rank in ranks}
        if not sent:
            return b""
        lowest = min(sent)
        reference = sent[lowest]
        for rank, packed in sorted(sent.items()):
            if packed != reference:
                raise PlanMismatchError(
                    f"ranks disagree on hyper-parameters: "
                    f"{_first_difference(unpack_control(reference), unpack_control(packed), lowest, rank)}; "
                    "change them in the same step on every worker"
                )
        return reference


def pack_hypers(
    groups: list[dict[str, Any]],
    lr_mult: Mapping[int, float],
    wd_mult: Mapping[int, float],
    update_on_kvstore: bool,
    limits: Mapping[str, Any] | None = None,
    stages: Mapping[str, Any] | None = None,
) -> bytes:
    """The bytes under which the hyper-parameters of a table travel; equal values give equal bytes.

    `limits` says what workers check of a gradient before it is used, and `stages` what else they must have alike, by
    name, so that they find out if they disagree.
    """
    values: dict[str, Any] = {
        "groups": [dict(sorted(group.items())) for group in groups],
        "lr_mult": dict(sorted(lr_mult.items())),
        "wd_mult": dict(sorted(wd_mult.items())),
        "update_on_kvstore": update_on_kvstore,
    }
    if limits is not None:
        values["limits"] = dict(sorted(limits.items()))
    return pack_control({**values, "stages": dict(sorted(stages.items()))} if stages else values)


def unpack_hypers(packed: bytes) -> dict[str, Any]:
    """Inverse of `pack_hypers`."""
    values: dict[str, Any] = _tuples(unpack_control(packed))
    return values


def effective_hypers(plan: Plan, optimizer: Optimizer, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Per key: its group's numbers with `lr` and `weight_decay` multiplied by the key's factors.

    Keys with equal numbers share one mapping, so a caller may compare by identity.
    """
    groups = values.get("groups") or [optimizer.hyper]
    lr_mult, wd_mult = values.get("lr_mult", {}), values.get("wd_mult", {})
    shared: dict[tuple[int, float, float], Mapping[str, Any]] = {}
    rows = []
    for key, spec in enumerate(plan.specs):
        factors = (spec.group if len(groups) > 1 else 0, lr_mult.get(key, 1.0), wd_mult.get(key, 1.0))
        if factors not in shared:
            row = {**optimizer.hyper, **groups[factors[0]]}
            if "lr" in row:
                row["lr"] = row["lr"] * factors[1]
            if "weight_decay" in row:
                row["weight_decay"] = row["weight_decay"] * factors[2]
            shared[factors] = row
        rows.append(shared[factors])
    return rows


def _check(values: Any, plan: Plan) -> None:
    names = {"groups", "lr_mult", "wd_mult", "update_on_kvstore"}
    ok = isinstance(values, dict) and set(values) - {"limits", "stages"} == names
    ok = ok and all(isinstance(values.get(name, {}), dict) for name in ("limits", "stages"))
    if ok:
        groups = values["groups"]
        needed = 1 + max(spec.group for spec in plan.specs)
        ok = isinstance(groups, list) and len(groups) >= needed and all(isinstance(g, dict) for g in groups)
        ok = ok and all(isinstance(group.get("lr", 0.0), int | float) for group in groups)
        ok = ok and all(
            isinstance(values[name], dict) and all(isinstance(v, int | float) for v in values[name].values())
            for name in ("lr_mult", "wd_mult")
        )
    if not ok:
        raise ConfigurationError(f"these are no hyper-parameters of this table: {values!r:.120}")


def _first_difference(a: dict[str, Any], b: dict[str, Any], rank_a: int, rank_b: int) -> str:
    if a["update_on_kvstore"] != b["update_on_kvstore"]:
        return (
            f"update_on_kvstore is {a['update_on_kvstore']} on rank {rank_a} and {b['update_on_kvstore']} on "
            f"rank {rank_b}"
        )
    for i, (left, right) in enumerate(zip(a["groups"], b["groups"], strict=False)):
        for name in sorted(set(left) | set(right)):
            if left.get(name) != right.get(name):
                return f"group {i} has {name}={left.get(name)} on rank {rank_a} and {right.get(name)} on rank {rank_b}"
    stages_a, stages_b = a.get("stages", {}), b.get("stages", {})
    for name in sorted(set(stages_a) | set(stages_b)):
        if stages_a.get(name) != stages_b.get(name):
            return (
                f"{name} is {stages_a.get(name)} on rank {rank_a} and {stages_b.get(name)} on rank {rank_b}"
            )
    limits_a, limits_b = a.get("limits", {}), b.get("limits", {})
    for name in sorted(set(limits_a) | set(limits_b)):
        if limits_a.get(name) != limits_b.get(name):
            return (
                f"the gradient is limited by {name}={limits_a.get(name)} on rank {rank_a} and {limits_b.get(name)} on "
                f"rank {rank_b}"
            )
    for name in ("lr_mult", "wd_mult"):
        if a[name] != b[name]:
            return f"{name} is {a[name]} on rank {rank_a} and {b[name]} on rank {rank_b} (key index: factor)"
    return f"rank {rank_a} has {len(a['groups'])} groups, rank {rank_b} has {len(b['groups'])}"


def _spec_difference(a: dict[str, Any], b: dict[str, Any], rank_a: int, rank_b: int) -> str:
    if a["name"] != b["name"]:
        return f"{a['name']!r} on rank {rank_a} and {b['name']!r} on rank {rank_b}"
    left, right = ({**spec["hyper"], **spec} for spec in (a, b))
    differing = (name for name in sorted(set(left) | set(right)) if left.get(name) != right.get(name))
    name = next(name for name in differing if name != "hyper")
    return (
        f"{a['name']!r} has {name}={left.get(name)} on rank {rank_a} and {right.get(name)} on rank {rank_b}"
    )


def _name_of(spec: bytes) -> Any:
    return unpack_control(spec)["name"]


def _tuples(value: Any) -> Any:
    """msgpack knows no tuples; `betas` must be one again."""
    if isinstance(value, dict):
        return {
            name: _tuples(item) if name != "groups" else [_tuples(g) for g in item]
            for name, item in value.items()
        }
    return tuple(value) if isinstance(value, list) else value
