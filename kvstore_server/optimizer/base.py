"""The base class of all optimizers: options and their checks, the learning rate, and the interface of an update.

An optimizer object only holds options. Its state (momentum, averages) is stored beside the weights (`state.States`),
so one class serves servers and in-process Trainers. Options are named like torch's group keys; Gluon's spelling is
accepted, too (`canonical_options`).

`Optimizer` is public: users subclass it. A subclass names its options in `defaults` and defines `update`; class
attributes tell the store how it may be called (`elementwise`, `positioned`, `may_raise`, …). `spec` describes an
optimizer as plain values, which is how it travels to servers and into files.

Options are checked when an optimizer is created and, because kernels also refuse some combinations, by a trial update
(`try_out`): an update that raises midway on a server could not be undone.
"""

from __future__ import annotations

import copy
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server import check
from kvstore_server.errors import ConfigurationError, SchedulerInUseError, did_you_mean
from kvstore_server.optimizer.compat import MXNET1, PREFIX, compat_parameter_names, compat_release_of_process
from kvstore_server.optimizer.lr_scheduler import LRScheduler, as_scheduler

ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
"""Gluon's spelling of an option → the group key, which is torch's."""

_GLUONS = {key: gluon for gluon, key in ALIASES.items()} | {"betas": "beta1 and beta2"}
_NEVER_NEGATIVE = frozenset({"weight_decay", "clip_gradient", "momentum", "eps"})


def canonical_options(
    options: Mapping[str, Any],
    valid: Mapping[str, Any],
    who: str,
    others: Sequence[str] = ("rescale_grad", "multi_precision"),
) -> dict[str, Any]:
    """Return `options` under the names of group keys; `others` are valid, too, but only listed in messages.

    Raises:
        ConfigurationError: An option is unknown, or given under two spellings.
    """
    result: dict[str, Any] = {}
    betas: dict[int, Any] = {}
    for given, value in options.items():
        name = given if given in valid else ALIASES.get(given, given)
        if given in ("beta1", "beta2") and "betas" in valid and given not in valid:
            betas[0 if given == "beta1" else 1] = value
        elif name not in valid:
            listing = ", ".join([*map(_optimizer_option_spellings, valid), *others])
            hint = did_you_mean(given, [*valid, *ALIASES, *others])
            raise ConfigurationError(f"{who} has no option {given!r}; its options are {listing}{hint}")
        elif name in result and not check.is_same(result[name], value):
            raise ConfigurationError(f"{who} was given {name!r} under two spellings; give it once")
        else:
            result[name] = value
    # Gluon's beta1 and beta2 are one option, betas, in torch.
    if betas and "betas" in result:
        pair = result["betas"]
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or any(not check.is_same(pair[i], value) for i, value in betas.items()):
            raise ConfigurationError(
                f"{who} was given betas and beta1 or beta2; give one of the two spellings"
            )
    elif betas:
        result["betas"] = tuple(betas.get(i, valid["betas"][i]) for i in (0, 1))
    return result


def _optimizer_option_spellings(key: str) -> str:
    return f"{key} (or {_GLUONS[key]})" if key in _GLUONS else key


def capability() -> str:
    """Return the instruction set of torch's kernels, as `x86_64/AVX2`; bits are only equal between equal ones."""
    return f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}"


_log = logging.getLogger(__name__)

StateValue = Any
"""One entry of an optimizer's state: a flat tensor, a 0-d tensor, a plain value, or a tree of these (see `trees`)."""
Values = dict[str, StateValue]
"""The entries of an optimizer's state by name."""
Hyper = Mapping[str, Any]
"""The options of an update under torch's group keys, multipliers applied."""

_COMMON: Mapping[str, Any] = {"lr": 0.01, "weight_decay": 0.0, "clip_gradient": None}
MAX_COUNT = 2**63 - 1
_ORDINARY = 1e9
"""Up to this magnitude of options, float32 can represent what formulas compute from them."""
_TRIED_KEPT = 64
_LINE = 16
"""Elements of float32 in a 64-byte line, for which kernels use vectors."""
_OURS = f"{__package__}."
_OTHERS = ("rescale_grad", "multi_precision", "lr_scheduler", "begin_num_update", "aggregate_num", "compat")
"""Options that are not group keys."""


class Optimizer:
    """Base class of Gluon's optimizers and of user-defined ones.

    A subclass names its own options, with their defaults, in `defaults` and defines `update`; `register` it to use it
    by name and on a server. Options are accepted under Gluon's and under torch's spelling (`learning_rate` or `lr`,
    `wd` or `weight_decay`, `beta1` and `beta2` or `betas`, `epsilon` or `eps`).

    Args:
        learning_rate: Step size; may be negative. Default 0.01, or the class's own. With an `lr_scheduler` it replaces
            the scheduler's `base_lr`, which is logged as a warning; by default the scheduler keeps its own.
        lr_scheduler: An LRScheduler, or a function of the number of updates, that determines the learning rate.
        begin_num_update: How many updates every key counts as having had before its first one.
        aggregate_num: MXNet's number of tensors per kernel call, an integer or math.inf; only stored.
        compat: For Gluon's optimizers, whose formulas and defaults apply: "mxnet1" is MXNet 1.9.1, "mxnet2" is 2.x.
            Default: the environment variable KVSTORE_COMPAT, or else "mxnet2".
        param_idx2name: With "mxnet1", in a store: the parameter's name for each key. As in MXNet 1.9.1, keys whose
            names end in neither _weight nor _gamma (with `lars`: not in _weight) get no weight decay, and `lars` finds
            by them the keys whose rate it must not scale.
        options: `wd` (0.0), `rescale_grad` (1.0; a factor of every gradient), `clip_gradient` (None, or the bound on
            each element of the rescaled gradient), `multi_precision` (False; True keeps a float32 copy of
            half-precision weights) and the class's own options.

    Raises:
        ConfigurationError: An option is unknown, is given under both spellings, or has an impossible value; nothing
            has changed then.
    """

    name: ClassVar[str]
    """Name to register under; by default the class's name in lower case."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """The class's own options with their defaults; subclasses inherit them."""
    elementwise: bool = True
    """Whether the update of an element only needs that element's weight, gradient and state. Otherwise each key is
    updated as a whole and is on a single server; see `update`.
    """
    clips: ClassVar[bool] = True
    """Whether gradients are clipped to `clip_gradient` before `update`."""
    delay_state: ClassVar[str | None] = None
    """The name of the state that holds the weights that a gradient was computed with; None if there is no such
    state.
    """
    positioned: ClassVar[bool] = False
    """Whether `update` needs the positions of the elements: `hyper` then has 'key', the name of their one key, and
    'first', the index of the first element in that key.
    """
    never_negative: ClassVar[frozenset[str]] = frozenset()
    """Group keys of the class that must not be negative; weight_decay, clip_gradient, momentum and eps never
    may be.
    """
    fractions: ClassVar[frozenset[str]] = frozenset()
    """Group keys of the class that must be at least 0 and less than 1; betas always must be."""
    may_raise: bool = True
    """Whether `update` may raise on valid input, so that the state must be kept for a rollback."""
    verified: bool = False
    """Whether tests show that zero padding stays zero and that bits do not depend on where a vector is cut."""
    one_pass: bool = False
    """Whether `update` reads its tensors only once, so that it need not be called in parts that fit the cache."""
    mxnet1: ClassVar[Mapping[str, Any] | None] = None
    """Options with another default in MXNet 1.9.1, or only there; None: it has no such optimizer."""
    mxnet1_aliases: ClassVar[Mapping[str, str]] = {}
    """MXNet 1.9.1's name of an option → that of 2.x."""
    mxnet1_clips_decay: ClassVar[bool] = False
    """Whether MXNet 1.9.1 adds weight decay to the gradient before clipping instead of after."""
    mxnet1_decayed: ClassVar[tuple[str, ...]] = ("_weight", "_gamma")
    """Endings of the names of parameters that MXNet 1.9.1 decays; see `param_idx2name`."""
    takes_pieces: bool = False
    """Whether `update` never writes to the gradient and also accepts it as `GradFragments`. Only counts for a class
    that is `verified`, because pieces may be cut anywhere. Not inherited: a subclass must declare it itself.
    """

    _is_sgd: ClassVar[bool] = False
    """Whether `update` is `w -= lr * grad` without momentum, weight decay and clipping, and then leaves the state
    alone. Only counts for a class that is `verified`.
    """

    hyper: dict[str, Any]
    """The current options under torch's group keys ('lr', 'weight_decay', 'momentum', ...); may be replaced."""
    rescale_grad: float
    multi_precision: bool
    lr_scheduler: LRScheduler | None = None
    begin_num_update: int = 0
    aggregate_num: float = 1
    is_mxnet1: bool = False
    """Whether formulas and defaults are those of MXNet 1.9.1."""
    param_idx2name: Mapping[str, str] = MappingProxyType({})
    """MXNet 1.9.1's name of each key; empty if not given."""
    num_update: int = 0
    """Updates so far, `begin_num_update` included, for `lr_scheduler`; the caller that applies updates
    maintains it.
    """
    _said_low_precision: bool = False
    _tried: frozenset[Any] | set[Any] = frozenset()
    """What `try_out` need not try again."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        own = vars(cls)
        cls.name = own.get("name") or cls.__name__.lower()
        # A class derived from one that takes pieces may have another `update`.
        cls.takes_pieces = bool(own.get("takes_pieces")) and cls.verified

    def __init__(
        self,
        learning_rate: float | None = None,
        *,
        lr_scheduler: LRScheduler | Callable[[int], float] | None = None,
        begin_num_update: int = 0,
        aggregate_num: float = 1,
        compat: str | None = None,
        **options: Any,
    ) -> None:
        if learning_rate is not None:
            options["learning_rate"] = learning_rate
        self._take_compat(compat, options)
        self._take_common(options)
        who, valid = self.registered_name, self._valid_options()
        given = canonical_options(options, valid, who, _OTHERS)
        self.hyper = {
            key: self._checked(key, given[key], default) if key in given else default
            for key, default in valid.items()
        }
        self.begin_num_update = self.num_update = check.integer(
            f"{who}: begin_num_update", begin_num_update, 0, MAX_COUNT
        )
        if not (check.is_number(aggregate_num) and aggregate_num == math.inf):
            aggregate_num = check.integer(f"{who}: aggregate_num", aggregate_num, 1, MAX_COUNT)
        self.aggregate_num = aggregate_num
        if lr_scheduler is not None:
            self._follow(as_scheduler(lr_scheduler), self.hyper["lr"] if "lr" in given else None)

    @property
    def registered_name(self) -> str:
        """The name of this optimizer on servers and in files, with the prefix "mxnet1:" for MXNet 1.9.1's formulas."""
        name: str = getattr(type(self), "name", "optimizer")
        return PREFIX + name if self.is_mxnet1 else name

    @property
    def learning_rate(self) -> float:
        """The scheduler's rate for `num_update`, or the group's 'lr' without a scheduler."""
        if self.lr_scheduler is not None:
            return float(self.lr_scheduler(self.num_update))
        return float(self.hyper["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate for the next update.

        Raises:
            SchedulerInUseError: The learning rate comes from a scheduler.
            ConfigurationError: It is not a finite number, or the class allows no negative one.
        """
        if self.lr_scheduler is not None:
            raise SchedulerInUseError(
                f"{self.registered_name} takes its learning rate from {self.lr_scheduler!r}, so {lr!r} would have no "
                "effect; set the scheduler's base_lr, or create the optimizer without lr_scheduler"
            )
        self.hyper["lr"] = self._checked("lr", lr, 0.0)

    @property
    def lr(self) -> float:
        return self.learning_rate

    @lr.setter
    def lr(self, value: float) -> None:
        self.set_learning_rate(value)

    @property
    def wd(self) -> float:
        """Weight decay; 0.0 for a torch class that has none (Rprop)."""
        return float(self.hyper.get("weight_decay", 0.0))

    @property
    def clip_gradient(self) -> float | None:
        """Bound on each element of the rescaled gradient; None if there is no bound (always for torch's)."""
        bound: float | None = self.hyper.get("clip_gradient")
        return bound

    def spec(self) -> dict[str, Any]:
        """Describe this optimizer as plain values; `create_optimizer_from_spec` rebuilds it.

        Progress (`num_update`) is not included.

        Raises:
            ConfigurationError: `lr_scheduler` is code, which cannot be sent.
        """
        described: dict[str, Any] = {
            "name": self.registered_name,
            "hyper": self.plain_hyper(),
            "rescale_grad": self.rescale_grad,
            "multi_precision": self.multi_precision,
        }
        if self.begin_num_update:
            described["begin_num_update"] = self.begin_num_update
        if self.aggregate_num != 1:
            described["aggregate_num"] = self.aggregate_num
        if self.param_idx2name:
            described["param_idx2name"] = dict(self.param_idx2name)
        if self.lr_scheduler is not None:
            described["lr_scheduler"] = self.lr_scheduler.spec()
        return described

    def plain_hyper(self) -> dict[str, Any]:
        return {
            key: plain_option_value(self.hyper[key]) for key in self._valid_options() if key in self.hyper
        }

    def without_scheduler(self) -> Optimizer:
        alone = copy.copy(self)
        alone.lr_scheduler = None
        return alone

    def updates_rows(self, hyper: Hyper) -> bool:
        """Return whether a row-sparse gradient updates only its rows: others get neither weight decay nor momentum.

        Otherwise it counts as a dense gradient with zeros elsewhere. `hyper` is as for `update`.
        """
        return False

    def takes_sparse(self, hyper: Hyper) -> bool:
        """Return whether `update` wants row-sparse gradients of keys as sparse tensors."""
        return False

    def decay_factor(self, key: str) -> float:
        """Return the factor of a key's weight decay; see `param_idx2name`."""
        name = self.param_idx2name.get(key)
        return 1.0 if name is None or name.endswith(self.mxnet1_decayed) else 0.0

    def hyper_for_rows(self, weight: Tensor, grad_rows: Tensor, hyper: Hyper) -> Hyper:
        """Add what `update` needs to know of the whole key when it only gets some rows; see `updates_rows`."""
        return hyper

    def check_key(self, key: str, shape: Sequence[int], hyper: Hyper) -> None:
        """Raise ConfigurationError, naming the key, if it cannot be updated. Most optimizers can update any key."""

    def try_out(self, hyper: Hyper) -> None:
        """Try updates with these options; raise ConfigurationError if one fails. Only for our and torch's optimizers.

        An update that fails midway could not be undone, and what kernels refuse depends on combinations of options: a
        learning rate may be too large for float32 only after bias correction. Not tried are optimizers that may raise
        anyway, and user-defined ones, derived from ours or not: they may count their updates, draw random numbers, or
        not know such a key.

        Args:
            hyper: As for `update`, without what that adds. Entries that are not options, such as a group's parameters,
                are ignored.
        """
        if self.may_raise or not type(self).__module__.startswith(_OURS):
            return
        # 1. Options only (a live group also has its parameters), reduced to what matters; each combination once.
        hyper = {name: value for name, value in hyper.items() if name in self._option_names}
        odd = tuple([(name, _summarize_optimizer_option(value)) for name, value in hyper.items()])
        if odd in self._tried:
            return
        # 2. Two updates of a copy: the first creates state, the second uses it.
        probe = copy.copy(self)
        probe.mute()
        shape = (_LINE,) if self.elementwise else (1, _LINE)
        state = Values()
        try:
            # A script may have set any default device or dtype, even one without data.
            with torch.no_grad(), torch.device("cpu"):
                weight = torch.ones(shape, dtype=torch.float32, device="cpu")
                for step in (1, 2):
                    step_hyper = {**hyper, "step": step, "key": "", "first": 0}
                    state = state or probe.create_state(weight)
                    probe.update(
                        weight, torch.ones(shape, dtype=torch.float32, device="cpu"), state, step_hyper
                    )
        except Exception as error:
            given = ", ".join(f"{name}={value!r:.80}" for name, value in hyper.items())
            raise ConfigurationError(
                f"{self.registered_name} cannot update with {given}: {type(error).__name__}: {error}"
            ) from error
        # 3. Remember it. What is unusual about a group rarely changes, but may change in each step.
        self._tried = {*self._tried, odd} if len(self._tried) < _TRIED_KEPT else {odd}

    @cached_property
    def _option_names(self) -> frozenset[str]:
        return frozenset(self._valid_options())

    def mute(self) -> None:
        """Stop logging warnings; for a copy that only tries something."""
        self._said_low_precision = True

    def warn_of_low_precision(self, dtype: torch.dtype) -> None:
        """Warn once that updates of half-precision weights without a float32 copy may be lost."""
        if not self._said_low_precision:
            self._said_low_precision = True
            # Once per optimizer: every step would say the same.
            _log.warning(
                "%s updates %s weights without multi_precision: an update smaller than half a rounding step of its "
                "weight is lost; multi_precision=True keeps a float32 copy",
                self.registered_name,
                str(dtype).removeprefix("torch."),
            )

    def create_state(self, weight: Tensor) -> Values:
        """Return the state before the first update: tensors like `weight`, 0-d tensors and plain values."""
        return {}

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        """Apply one update to `weight` and `state` in place.

        `weight` and `grad` are flat, both float32 or both float64, and contain adjacent elements of one or several
        keys, with zeros between and after them. `grad` is already rescaled and clipped, and may be overwritten. The
        result for an element must not depend on its neighbours.

        A state entry may be changed in place or replaced. It is a tensor of the shape of `weight`, a 0-d one, a
        number, a text, bytes, None, or a dict, list or tuple of such. The names 'step' and 'master' are reserved.

        `hyper` has `self.hyper` with multipliers applied to 'lr' and 'weight_decay', and 'step', the number of this
        update of these keys, from begin_num_update + 1; also 'key' and 'first' for a class that is `positioned`.

        With `elementwise = False`, `weight` and `grad` are one whole key in its own shape instead, state tensors may
        have any shape, `hyper` also has 'key', its name, and elements may depend on each other.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(weight, grad, state, hyper)")

    def _valid_options(self) -> dict[str, Any]:
        """Return the options that end up in `hyper`, by group key, with their defaults."""
        valid = dict(_COMMON)
        for cls in reversed(type(self).__mro__):
            own = vars(cls)
            found = {**own.get("defaults", {}), **((self.is_mxnet1 and own.get("mxnet1")) or {})}
            valid.update({ALIASES.get(key, key): v for key, v in found.items()})
        return valid

    def _take_compat(self, compat: str | None, options: dict[str, Any]) -> None:
        """Choose the release to follow, and convert options that only MXNet 1.9.1 has or names differently."""
        # The environment variable does not apply to an optimizer that has only one set of formulas.
        has_say = compat is not None or self.mxnet1 is not None
        is_mxnet1 = has_say and compat_release_of_process(compat) == MXNET1
        if is_mxnet1 and self.mxnet1 is None:
            raise ConfigurationError(
                f"MXNet 1.9.1 has no optimizer {self.registered_name!r}, so compat='mxnet1' means nothing; leave it "
                "out"
            )
        self.is_mxnet1 = is_mxnet1
        if not is_mxnet1:
            return
        who = self.registered_name
        self.param_idx2name = compat_parameter_names(options.pop("param_idx2name", {}), who)
        for theirs, ours in self.mxnet1_aliases.items():
            if theirs in options:
                if ours in options:
                    raise ConfigurationError(f"{who} was given {ours!r} under two spellings; give it once")
                options[ours] = options.pop(theirs)

    def _take_common(self, options: dict[str, Any]) -> None:
        self.rescale_grad = self._checked("rescale_grad", options.pop("rescale_grad", 1.0), 1.0)
        self.multi_precision = self._checked("multi_precision", options.pop("multi_precision", False), False)

    def _checked(self, name: str, value: Any, default: Any) -> Any:
        """Return `value` as the type of `default`. Raises ConfigurationError for another type, or out of range."""
        who = self.registered_name
        if isinstance(default, tuple):
            if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(default):
                raise ConfigurationError(f"{who}: {name} must be {len(default)} numbers, got {value!r}")
            return tuple(self._checked(name, v, d) for v, d in zip(value, default, strict=True))
        if isinstance(default, bool | str):
            if not isinstance(value, type(default)):
                raise ConfigurationError(f"{who}: {name} must be a {type(default).__name__}, got {value!r}")
            return value
        if value is None and default is None:
            return None
        # Bounds by name: betas and the class's fractions in [0, 1), others not negative where that makes sense.
        is_fraction = name == "betas" or name in self.fractions
        least = 0 if is_fraction or name in _NEVER_NEGATIVE | self.never_negative else None
        number = check.number(
            f"{who}: {_optimizer_option_spellings(name)}", value, least, below=1 if is_fraction else None
        )
        return int(value) if isinstance(default, int) and check.is_integer(value) else number

    def _follow(self, scheduler: LRScheduler, lr: float | None) -> None:
        if lr is not None and lr != scheduler.base_lr:
            former, scheduler.base_lr = scheduler.base_lr, lr
            _log.warning(
                "learning_rate %g of %s replaces base_lr %g of %r",
                lr,
                self.registered_name,
                former,
                scheduler,
            )
        self.lr_scheduler = scheduler
        self.hyper["lr"] = self.learning_rate


def _summarize_optimizer_option(value: Any) -> Any:
    """Reduce an option to what can make an update fail; ordinary numbers to their type and whether they are 0."""
    if type(value) in (float, int) and abs(value) <= _ORDINARY:
        return type(value), value != 0
    return (
        tuple(map(_summarize_optimizer_option, value))
        if isinstance(value, tuple | list)
        else (type(value), repr(value))
    )


def optimizer_count_dtype() -> torch.dtype:
    """Return the dtype of step counts for kernels: the default dtype, unless it is too narrow."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def plain_option_value(value: Any) -> Any:
    """Return what msgpack can represent: a number for a 0-d tensor, a list for a tuple."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [plain_option_value(item) for item in value]
    return value
