"""Agreement of the ranks on the optimizer and on the hyper-parameters of a round.

Each rank sends its own values, and the lowest rank's are effective; a rank that disagrees is named in an error. A rank
sends hyper-parameters only when they change, so the last ones that it sent count.

The hyper-parameters of a table are sent as msgpack of {"groups": [{name: number, …}, …], "lr_mult": {key index:
factor}, "wd_mult": {…}, "update_on_kvstore": …}; a key without a factor has 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvstore_server.errors import ConfigurationError, PlanMismatchError
from kvstore_server.optimizer import Optimizer, create_optimizer_from_spec
from kvstore_server.optimizer.base import Hyper
from kvstore_server.plan import Plan
from kvstore_server.protocol.frames import pack_control, unpack_control
from kvstore_server.shard.table_optimizer import check_hash_table, table_optimizer


class AgreedOptimizer:
    """The optimizer of one namespace, as each rank named it.

    Args:
        is_sync: Whether ranks must agree on its options. In asynchronous modes each rank changes them at its own time,
            so only the optimizer's name must be the same.
    """

    def __init__(self, is_sync: bool = True) -> None:
        self._is_sync = is_sync
        self._is_agreed = True
        """True if the ranks were compared since the last change."""
        self._sent: dict[int, bytes] = {}
        self._spec = b""
        """The spec that `named` was built from."""
        self.named: Optimizer | None = None
        """The optimizer that was named last; None before the first."""

    def set(
        self, rank: int, spec: bytes, accept: Callable[[Optimizer], None] = lambda optimizer: None
    ) -> str | None:
        """Record the optimizer that a rank names; return the name of a different one that it replaces, if any.

        A new optimizer is passed to `accept` first, which may raise.

        Raises:
            UnknownNameError: No optimizer of that name is registered on this server.
            ConfigurationError: Its options are not valid.
        """
        before = self.named
        if before is None or self._spec != spec:
            values = unpack_control(spec)
            if not isinstance(values, dict) or "name" not in values:
                raise ConfigurationError(f"an optimizer is sent as a map with a name, got {values!r:.80}")
            built = create_optimizer_from_spec(_restore_option_tuples(values))
            built.try_out(built.hyper)
            accept(built)
            self._spec, self.named = spec, built
        self._sent[rank] = spec
        self._is_agreed = False
        if before is None or self.named is None or before.registered_name == self.named.registered_name:
            return None
        return before.registered_name

    def sent(self) -> list[tuple[int, bytes]]:
        """Return what `set` was called with, each rank's last; the one that is effective now comes last."""
        return sorted(self._sent.items(), key=lambda one: one[1] == self._spec)

    def is_known(self, spec: bytes) -> bool:
        """Return whether any rank has sent this optimizer."""
        return spec in self._sent.values()

    def agreed(self) -> Optimizer | None:
        """Return the optimizer with the lowest rank's options, if any. Raises PlanMismatchError if ranks differ."""
        if self.named is None or self._is_agreed:
            return self.named
        # The lowest rank's is effective; compare all others with it.
        reference = self._sent[min(self._sent)]
        if self._spec != reference:
            self._spec, self.named = (
                reference,
                create_optimizer_from_spec(_restore_option_tuples(unpack_control(reference))),
            )
        names = {s: None if self._is_sync else unpack_control(s)["name"] for s in self._sent.values()}
        sent = {r: s for r, s in self._sent.items() if self._is_sync or names[s] != names[reference]}
        sent[min(self._sent)] = reference
        _check_options_agree(
            sent, _describe_sent_optimizer, "set different optimizers", "set the same one on every worker"
        )
        self._is_agreed = True
        return self.named


class AgreedOptions:
    """The hyper-parameters of one table, as each rank last sent them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sent: dict[int, bytes] = {}
        self._cached: tuple[bytes, float | None, Optimizer, list[Hyper]] | None = None

    def check(self, packed: bytes) -> None:
        if packed not in self._sent.values():
            _check_agreed_hypers(unpack_control(packed), self._plan)

    def set(self, rank: int, packed: bytes) -> None:
        """Record what a rank sent with its commit, after `check`."""
        self._sent[rank] = packed

    def effective(self, optimizer: Optimizer, packed: bytes, rate: float | None = None) -> list[Hyper]:
        """Return the effective hyper-parameters of each key, multipliers applied.

        Args:
            packed: The table's, as returned by `common` or `lowest`.
            rate: The learning rate of all groups if a scheduler decides it.

        Raises:
            ConfigurationError: The optimizer cannot update one of the keys.
        """
        cached = self._cached
        # The optimizer itself is compared, not its id: a new one may get the address of one that was freed.
        if cached is None or cached[:2] != (packed, rate) or cached[2] is not optimizer:
            values: dict[str, Any] = unpack_hypers(packed) if packed else {"groups": None}
            if rate is not None:
                values["groups"] = [{**group, "lr": rate} for group in values["groups"] or [optimizer.hyper]]
            rows = effective_hypers(self._plan, optimizer, values)
            for spec, row in zip(self._plan.specs, rows, strict=True):
                if spec.hash_table is None:
                    optimizer.check_key(spec.key, spec.shape, row)
                else:
                    own, _ = table_optimizer(spec.hash_table, optimizer)
                    check_hash_table(f"hash table {spec.key!r}", spec.hash_table, own, row)
                    if optimizer.may_raise:  # an update of rows could not be taken back
                        raise ConfigurationError(
                            f"optimizer {optimizer.registered_name} may raise in the middle of a round, so it cannot "
                            f"train parameters beside the hash table {spec.key!r}; use one that is built in"
                        )
            cached = self._cached = (packed, rate, optimizer, rows)
        return cached[3]

    def sent(self) -> dict[int, bytes]:
        return dict(self._sent)

    def restore(self, sent: Mapping[int, bytes]) -> None:
        self._sent = dict(sent)

    def forget(self, rank: int) -> None:
        self._sent.pop(rank, None)

    def lowest(self, without: Collection[int] = ()) -> bytes:
        """Return what the lowest rank sent, packed, ignoring the ranks in `without`; empty if none has sent any."""
        senders = [rank for rank in self._sent if rank not in without] or list(self._sent)
        return self._sent[min(senders)] if senders else b""

    def common(self, ranks: Collection[int], declared: Mapping[int, bytes] = {}) -> bytes:
        """Return what these ranks sent or (`declared`) will send, packed. Raises PlanMismatchError if they differ."""
        if not self._sent and not declared:
            return b""
        # Only these ranks' values count: others may have joined, or left.
        sent = {rank: packed for rank, packed in {**self._sent, **declared}.items() if rank in ranks}
        if len(set(sent.values())) > 1:
            way_out = "change them in the same step on every worker"
            _check_options_agree(sent, _describe_sent_options, "disagree on hyper-parameters", way_out)
        return sent[min(sent)] if sent else b""


def pack_hypers(
    groups: list[dict[str, Any]],
    lr_mult: Mapping[int, float],
    wd_mult: Mapping[int, float],
    update_on_kvstore: bool,
    limits: Mapping[str, Any] | None = None,
    stages: Mapping[str, Any] | None = None,
) -> bytes:
    """Pack the hyper-parameters of a table; equal values give equal bytes.

    `limits` contains what workers check of a gradient before it is used, and `stages` other options that all workers
    must share. Servers only compare them.
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
    values: dict[str, Any] = _restore_option_tuples(unpack_control(packed))
    return values


def effective_hypers(plan: Plan, optimizer: Optimizer, values: Mapping[str, Any]) -> list[Hyper]:
    """Return each key's hyper-parameters, tried out, with `lr` and `weight_decay` multiplied by the key's factors.

    A hash table that has an optimizer of its own takes at most the learning rate from its group. Keys with equal
    values share one mapping, so callers may compare by identity.

    Raises:
        ConfigurationError: An optimizer cannot update with its options.
    """
    groups = values.get("groups") or [optimizer.hyper]
    lr_mult, wd_mult = values.get("lr_mult", {}), values.get("wd_mult", {})
    shared: dict[tuple[int, float, float, str], Hyper] = {}
    rows = []
    for key, spec in enumerate(plan.specs):
        own, has_rate = table_optimizer(spec.hash_table, optimizer)
        decay = wd_mult.get(key, 1.0) * own.decay_factor(spec.key)
        described = "" if spec.hash_table is None else spec.hash_table.optimizer
        factors = (spec.group if len(groups) > 1 else 0, lr_mult.get(key, 1.0), decay, described)
        if factors not in shared:
            group = groups[factors[0]]
            if own is not optimizer:
                group = {"lr": group["lr"]} if "lr" in group and not has_rate else {}
            row = {**own.hyper, **group}
            for name, factor in zip(("lr", "weight_decay"), factors[1:3], strict=True):
                if name in row:
                    row[name] = row[name] * factor
            own.try_out(row)
            shared[factors] = row
        rows.append(shared[factors])
    return rows


def _check_agreed_hypers(values: Any, plan: Plan) -> None:
    names = {"groups", "lr_mult", "wd_mult", "update_on_kvstore"}
    is_fit = isinstance(values, dict) and set(values) - {"limits", "stages"} == names
    is_fit = is_fit and all(
        isinstance(values.get(n, {}), dict) for n in ("limits", "stages", "lr_mult", "wd_mult")
    )
    if is_fit:
        groups = values["groups"]
        is_fit = isinstance(groups, list) and len(groups) > max(spec.group for spec in plan.specs)
        is_fit = is_fit and all(isinstance(group, dict) for group in groups)
        # Check what is multiplied here. The rest is checked by the workers, and by the optimizer on use.
        multiplied = (
            [group.get(name, 0) for group in groups for name in ("lr", "weight_decay")] if is_fit else []
        )
        is_fit = is_fit and all(isinstance(number, int | float) for number in multiplied)
        factors = (*values["lr_mult"].values(), *values["wd_mult"].values())
        is_fit = is_fit and all(isinstance(factor, int | float) for factor in factors)
    if not is_fit:
        raise ConfigurationError(f"these are not hyper-parameters of this table: {values!r:.120}")


Said = dict[str, Any]
"""The beginning of a sentence → the value that completes it."""


def _check_options_agree(
    sent: Mapping[int, bytes], said_of: Callable[[dict[str, Any]], Said], problem: str, way_out: str
) -> None:
    """Raise PlanMismatchError with the first difference if a rank sent something else than the lowest one."""
    lowest = min(sent)
    for rank, packed in sorted(sent.items()):
        if packed != sent[lowest]:
            mine, other = (said_of(unpack_control(one)) for one in (sent[lowest], packed))
            names = [name for name in mine | other if mine.get(name) != other.get(name)]
            first = names[0] if names else "in unnamed values, "
            raise PlanMismatchError(
                f"ranks {problem}: {first}{mine.get(first)} on rank {lowest} and {other.get(first)} on rank {rank}; "
                f"{way_out}"
            )


def _describe_sent_options(values: dict[str, Any]) -> Said:
    groups, limits = values["groups"], values.get("limits", {})
    return {
        "update_on_kvstore is ": values["update_on_kvstore"],
        "the number of groups is ": len(groups),
        **{f"group {i} has {name}=": group[name] for i, group in enumerate(groups) for name in sorted(group)},
        **{f"{name} is ": value for name, value in values.get("stages", {}).items()},
        **{f"the gradient is limited by {name}=": value for name, value in limits.items()},
        **{f"by index of the key, {name} is ": values[name] for name in ("lr_mult", "wd_mult")},
    }


def _describe_sent_optimizer(spec: dict[str, Any]) -> Said:
    name, hypers = spec["name"], {**spec["hyper"], **spec}
    return {"": repr(name), **{f"{name!r} has {n}=": hypers[n] for n in sorted(hypers) if n != "hyper"}}


def _restore_option_tuples(value: Any) -> Any:
    """Turn lists back into tuples, which msgpack does not have, except the list of groups."""
    if isinstance(value, dict):
        return {
            name: _restore_option_tuples(item)
            if name != "groups"
            else [_restore_option_tuples(g) for g in item]
            for name, item in value.items()
        }
    return tuple(value) if isinstance(value, list) else value
