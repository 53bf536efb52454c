"""Optimizers of torch's kind that the library does not know, each with a habit of some real one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LR = 1 / 64
"""Their learning rate in the tests; exact in every dtype."""


class Plain(torch.optim.Optimizer):
    """Made as MMCV's documentation makes one: w -= a * (grad + b), and no learning rate anywhere."""

    def __init__(self, params: Any, a: float, b: float, c: Any) -> None:
        super().__init__(params, {"a": a, "b": b, "c": c})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + group["b"], alpha=group["a"])


class Sharing(torch.optim.Optimizer):
    """Keeps what nobody else could keep for it: in its groups, its attributes, and under a name of its own."""

    def __init__(self, params: Any, lr: float = 0.1, *, mode: str = "mean", **others: Any) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "names": ("x", None), **others})
        self.mode, self.total = mode, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.total += float(p.grad.sum())
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("history", [None]).append(p.grad.clone())
                p.data = p.data - group["lr"] / group["k"] * (p.grad + 0.01 * self.total)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]
        super().load_state_dict({name: v for name, v in state_dict.items() if name != "total"})


class Sharpness(torch.optim.Optimizer):
    """SAM in its usual form: another optimizer inside, and the loss evaluated twice."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["here"] = p.clone()
                    p.add_(p.grad, alpha=0.05)
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(self.state[p]["here"])
        self.inner.step()
        return loss


class Renamed(torch.optim.Optimizer):
    """Takes its parameters by the second argument, and has options of Gluon's names."""

    def __init__(self, learning_rate: float, params: Any, wd: float = 0.0) -> None:
        super().__init__(params, {"learning_rate": learning_rate, "wd": wd})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + group["wd"] * p, alpha=group["learning_rate"])


class Passing(torch.optim.SGD):
    """Passes on what it is given."""

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **options)


class Hidden(Plain):
    """Keeps an argument where nobody finds it."""

    def __init__(self, params: Any, a: float, b: float, c: Any, hidden: float = 1.0) -> None:
        super().__init__(params, a * hidden, b, c)


class Remembered(Plain):
    """Keeps an argument as an attribute of that name."""

    def __init__(self, params: Any, a: float, b: float, c: Any, extra: float) -> None:
        super().__init__(params, a, b, c)
        self.extra = extra


class Averaging(torch.optim.Optimizer):
    """Makes its state when there is none, as MMCV's documentation does, and keeps no count under torch's name."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p), alpha=group["lr"])

    def direction(self, p: Any) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state.update(n=0, m=torch.zeros_like(p))
        state["n"] += 1
        return state["m"].add_((p.grad - state["m"]) / state["n"])  # type: ignore[no-any-return]


class Stateless(Averaging):
    """Keeps nothing, and minds if somebody else does."""

    def direction(self, p: Any) -> torch.Tensor:
        assert not self.state[p]
        return p.grad  # type: ignore[no-any-return]


class OwnAdam(torch.optim.Adam):
    """Keeps its count as torch's own classes do."""


class OwnAdagrad(torch.optim.Adagrad):
    """Makes its state, the count too, in its constructor."""


class LateCount(Averaging):
    """Begins to count at its second step, and refuses a gradient of zeros."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(bool(p.grad.any()) for g in self.param_groups for p in g["params"] if p.grad is not None)
        counts = {p: s.pop("step", 0) + 1 for p, s in self.state.items() if s}
        super().step()
        for p, count in counts.items():
            self.state[p]["step"] = count
            p.sub_(count / 64)


class Forgetting(Plain):
    """Takes what it needs only once out of its groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            self.found = group.pop("c", None)


class Averaged(torch.optim.Optimizer):
    """Trains some weights and evaluates their mean, as the optimizers of schedulefree do."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "is_training": False, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["is_training"]
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p, 1 / group["count"])

    @torch.no_grad()
    def _swap(self, is_training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["is_training"] != is_training else ():
                if "mean" in self.state[p]:
                    kept = p.clone()
                    p.copy_(self.state[p]["mean"])
                    self.state[p]["mean"] = kept
            group["is_training"] = is_training

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)


class TensorRate(torch.optim.Optimizer):
    """Keeps options as tensors and insists on them, as torchao's classes do; one of them it changes in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "scale": 1.0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.update({name: torch.as_tensor(group[name], dtype=torch.float32) for name in ("lr", "scale")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert all(isinstance(group[name], Tensor) for name in ("lr", "scale"))
            group["scale"].mul_(0.5)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * group["scale"] * p.grad)


class Fixed(TensorRate):
    """Changes nothing but the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"].mul(p.grad))


class Configured(Averaging):
    """Has an attribute that is no plain value, as bitsandbytes' 8-bit classes have."""

    def __init__(self, params: Any, lr: float = 0.1, args: Any = None) -> None:
        super().__init__(params, lr=lr)
        self.args = args or object()


class Halves(Tensor):
    """A tensor made of two others, which knows no operation, as torchao's quantised ones know few."""

    high: Tensor
    low: Tensor

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, high.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, high: Tensor, low: Tensor) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Halves:
        return Halves(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return Halves(args[0].high, args[0].low)
        raise NotImplementedError(func)


class Composing(torch.optim.Optimizer):
    """Keeps its momentum in such a tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = Halves(torch.zeros_like(p), torch.zeros_like(p))
                    momentum = state["momentum"]
                    momentum.high.add_(p.grad)
                    momentum.low.add_(p.grad, alpha=0.5)
                    p.sub_(group["lr"] * (momentum.high + momentum.low))


class Momentum(torch.optim.Optimizer):
    """Begins with its first gradient itself, as torch's SGD does, and keeps no count."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["buffer"] = state["buffer"].add(p.grad, alpha=0.5) if state else p.grad.clone()
                    p.sub_(group["lr"] * state["buffer"])
