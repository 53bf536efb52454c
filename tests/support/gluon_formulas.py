"""Gluon's optimizers as their published formulas, in float64 NumPy: the oracle for every store; nothing of ours.

A formula takes (w, g, s, t, lr, wd, o): weights, rescaled gradient, the key's state, the number of the update from 1
on, learning rate and weight decay of the key, and the options under Gluon's names, with 'key', the key's name. It
gives the new weights. All that is not in the options must be: there are no defaults but "no clipping".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Numbers = Any
"""A float64 array or number."""
Step = Callable[[Numbers, Numbers, dict[str, Numbers], int, float, float, Mapping[str, Any]], Numbers]


class Zeros(dict[str, Any]):
    """A state whose missing entries are 0."""

    def __missing__(self, name: str) -> float:
        return 0.0


class Reference:
    """An optimizer over named keys.

    Args:
        name, options: as of `kvtrainer.optimizer.create`; rescale_grad is left to the caller.
        stored: what becomes of new weights when they are stored, such as rounding; by default nothing.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        stored: Callable[[Numbers], Numbers] = lambda weights: weights,
    ) -> None:
        self.name, self.options, self.stored = name, options, stored
        self._steps: dict[str, int] = {}
        self._states: dict[str, Zeros] = {}

    def update(self, key: str, w: Numbers, g: Numbers, lr: float, wd: float) -> Numbers:
        """The new weights of one key."""
        t = self._steps[key] = self._steps.get(key, 0) + 1
        state = self._states.setdefault(key, Zeros())
        result = self.stored(FORMULAS[self.name](w, g, state, t, lr, wd, {**self.options, "key": key}))
        if self.name.endswith("ftml"):
            # MXNet remembers the weights in z; what was stored is what counts here.
            state["z"] = -state["d"] * result
        return result


def clip(g: Numbers, bound: float | None) -> Numbers:
    return g if bound is None else np.clip(g, -bound, bound)


def clipped(g: Numbers, o: Mapping[str, Any]) -> Numbers:
    return clip(g, o.get("clip_gradient"))


def average(s: dict[str, Any], name: str, beta: float, value: Numbers) -> Numbers:
    s[name] = beta * s[name] + (1 - beta) * value
    return s[name]


def sgd(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o) + wd * w
    s["m"] = o["momentum"] * s["m"] - lr * g
    return w + s["m"]


def nag(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o) + wd * w
    s["m"] = o["momentum"] * s["m"] - lr * g
    return w + o["momentum"] * s["m"] - lr * g


def signum(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    if o["momentum"] == 0:
        return (1 - lr * (wd + o["wd_lh"])) * w - lr * np.sign(g)
    s["m"] = o["momentum"] * s["m"] - (1 - o["momentum"]) * (clipped(g, o) + wd * w)
    return (1 - lr * o["wd_lh"]) * w + lr * np.sign(s["m"])


def dcasgd(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o) + wd * w
    before = s["before"] if t > 1 else w
    d = g + o["lamda"] * g**2 * (w - before)
    s["m"] = o["momentum"] * s["m"] - lr * d
    s["before"] = w
    return w + s["m"]


def ftml(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g, beta1, beta2 = clipped(g, o) + wd * w, o["beta1"], o["beta2"]
    v = average(s, "v", beta2, g**2)
    d = (1 - beta1**t) / lr * (np.sqrt(v / (1 - beta2**t)) + o["epsilon"])
    s["z"] = beta1 * s["z"] + (1 - beta1) * g - (d - beta1 * s["d"]) * w
    s["d"] = d
    return -s["z"] / d


def corrected(t: int, lr: float, o: Any) -> float:
    on = o.get("correct_bias", True)
    return lr * np.sqrt(1 - o["beta2"] ** t) / (1 - o["beta1"] ** t) if on else lr


def adam(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o) + wd * w
    m, v = average(s, "m", o["beta1"], g), average(s, "v", o["beta2"], g**2)
    return w - corrected(t, lr, o) * m / (np.sqrt(v) + o["epsilon"])


def adamw(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o)
    m, v = average(s, "m", o["beta1"], g), average(s, "v", o["beta2"], g**2)
    return w - corrected(t, lr, o) * (m / (np.sqrt(v) + o["epsilon"]) + wd * w)


def adabelief(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g + wd * w, o)
    m = average(s, "m", o["beta1"], g)
    s["v"] = o["beta2"] * s["v"] + (1 - o["beta2"]) * (g - m) ** 2 + o["epsilon"]
    return w - corrected(t, lr, o) * m / (np.sqrt(s["v"]) + o["epsilon"])


def adamax(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o) + wd * w
    m = average(s, "m", o["beta1"], g)
    s["u"] = np.maximum(o["beta2"] * s["u"], np.abs(g))
    return w - lr / (1 - o["beta1"] ** t) * m / (s["u"] + 1e-8)


def nadam(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o) + wd * w
    rate, following = (o["beta1"] * (1 - 0.5 * 0.96 ** (n * o["schedule_decay"])) for n in (t, t + 1))
    product = rate * (s["product"] if t > 1 else 1.0)
    s["product"] = product
    m, v = average(s, "m", o["beta1"], g), average(s, "v", o["beta2"], g**2)
    blend = following * m / (1 - product * following) + (1 - rate) * g / (1 - product)
    return w - lr * blend / (np.sqrt(v / (1 - o["beta2"] ** t)) + o["epsilon"])


def adadelta(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o) + wd * w
    a = average(s, "a", o["rho"], g**2)
    d = g * np.sqrt(s["b"] + o["epsilon"]) / np.sqrt(a + o["epsilon"])
    average(s, "b", o["rho"], d**2)
    return w - lr * d


def adagrad(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o) + wd * w
    s["h"] = s["h"] + g**2
    return w - lr * g / (np.sqrt(s["h"]) + o["epsilon"])


def rmsprop(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o) + wd * w
    v = average(s, "v", o["rho"], g**2)
    if not o["centered"]:
        return clip(w - lr * g / (np.sqrt(v) + o["epsilon"]), o["clip_weights"])
    m = average(s, "m", o["rho"], g)
    s["d"] = o["momentum"] * s["d"] - lr * g / np.sqrt(v - m**2 + o["epsilon"])
    return clip(w + s["d"], o["clip_weights"])


def ftrl(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o)
    s["z"] = s["z"] + g - (np.sqrt(s["n"] + g**2) - np.sqrt(s["n"])) / lr * w
    s["n"] = s["n"] + g**2
    shrunk = np.sign(s["z"]) * np.maximum(np.abs(s["z"]) - o["lamda1"], 0)
    return -shrunk / ((np.sqrt(s["n"]) + o["beta"]) / lr + wd)


def plain(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    return w - lr * (g + wd * w)


def ratio(a: float, b: float) -> float:
    return a / b if a and b else 1.0


def bounded(w: Numbers, o: Any) -> float:
    length = max(float(np.linalg.norm(w)), o.get("lower_bound") or 0.0)
    return min(length, o.get("upper_bound") or np.inf)


def lamb(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o)
    m, v = average(s, "m", o["beta1"], g), average(s, "v", o["beta2"], g**2)
    if o.get("bias_correction", True):
        m, v = m / (1 - o["beta1"] ** t), v / (1 - o["beta2"] ** t)
    u = m / (np.sqrt(v) + o["epsilon"]) + wd * w
    return w - lr * ratio(bounded(w, o), float(np.linalg.norm(u))) * u


def lans(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g, beta1 = clipped(g / np.linalg.norm(g), o), o["beta1"]
    m, v = average(s, "m", beta1, g), average(s, "v", o["beta2"], g**2)
    root = np.sqrt(v / (1 - o["beta2"] ** t)) + o["epsilon"]
    averaged, newest = m / (1 - beta1**t) / root + wd * w, g / root + wd * w
    steps = ((beta1, averaged), (1 - beta1, newest))
    return w - lr * sum(
        part * ratio(bounded(w, o), float(np.linalg.norm(step))) * step for part, step in steps
    )


def lars(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    if not o["key"].endswith(("gamma", "beta", "bias")):
        size = float(np.linalg.norm(w))
        lr *= o["eta"] * size / (float(np.linalg.norm(g)) + wd * size + o["epsilon"])
    s["m"] = o["momentum"] * s["m"] - lr * (clipped(g, o) + wd * w)
    return w + s["m"]


def groupadagrad(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o)
    s["h"] = s["h"] + np.mean(g**2, axis=1, keepdims=True)
    return w - lr * g / (np.sqrt(s["h"]) + o["epsilon"])


def clipping_last(formula: Step) -> Step:
    """MXNet 1.9.1's order: what is clipped has the decay in it already."""

    def step(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
        return formula(w, clipped(g + wd * w, o), s, t, lr, 0.0, {**o, "clip_gradient": None})

    return step


def nag_of_1(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g, mu = clipped(g, o), o["momentum"]
    faded = mu * s["m"]
    new = w - faded + (mu + 1) * (faded - lr * (g + wd * w))
    s["m"] = faded - lr * (g + wd * new)
    return new


def dcasgd_of_1(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o)
    before = s["before"] if t > 1 else w
    s["m"] = o["momentum"] * s["m"] - lr * (g + wd * w + o["lamda"] * g**2 * (w - before))
    s["before"] = w
    return w + s["m"]


def adamax_of_1(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g + wd * w, o)
    m = average(s, "m", o["beta1"], g)
    s["u"] = np.maximum(o["beta2"] * s["u"], np.abs(g))
    return w - lr / (1 - o["beta1"] ** t) * m / s["u"]


def adadelta_of_1(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    return adadelta(w, clipped(g, o), s, t, 1.0, 0.0, {**o, "clip_gradient": None}) - wd * w


def adagrad_of_1(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o)
    s["h"] = s["h"] + g**2
    return w - lr * (g / np.sqrt(s["h"] + o["epsilon"]) + wd * w)


def rmsprop_of_1(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    if o["centered"]:
        return clipping_last(rmsprop)(w, g, s, t, lr, wd, o)
    g = clipped(g + wd * w, o)
    v = average(s, "v", o["rho"], g**2)
    return clip(w - lr * g / np.sqrt(v + o["epsilon"]), o["clip_weights"])


def lars_of_1(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    changed = lr / s["lr"] if s["lr"] and o["momentum_correction"] else 1.0
    s["m"], s["lr"] = s["m"] * changed, lr
    return lars(w, g, s, t, lr, wd, {**o, "key": "of no name"})


def groupadagrad_of_1(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clipped(g, o)
    s["h"] = s["h"] + np.mean(g**2, axis=1, keepdims=True)
    return w - lr * g / np.sqrt(s["h"] + o["epsilon"])


def plain_of_1(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    return w + g


FORMULAS: dict[str, Step] = {
    "sgd": sgd,
    "nag": nag,
    "signum": signum,
    "dcasgd": dcasgd,
    "ftml": ftml,
    "adam": adam,
    "adamw": adamw,
    "adabelief": adabelief,
    "adamax": adamax,
    "nadam": nadam,
    "adadelta": adadelta,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "ftrl": ftrl,
    "test": plain,
    "lamb": lamb,
    "lans": lans,
    "lars": lars,
    "groupadagrad": groupadagrad,
    "mxnet1:nag": nag_of_1,
    "mxnet1:dcasgd": dcasgd_of_1,
    "mxnet1:ftml": clipping_last(ftml),
    "mxnet1:adam": clipping_last(adam),
    "mxnet1:adamax": adamax_of_1,
    "mxnet1:nadam": clipping_last(nadam),
    "mxnet1:adadelta": adadelta_of_1,
    "mxnet1:adagrad": adagrad_of_1,
    "mxnet1:rmsprop": rmsprop_of_1,
    "mxnet1:lars": lars_of_1,
    "mxnet1:groupadagrad": groupadagrad_of_1,
    "mxnet1:test": plain_of_1,
}
"""Every optimizer of Gluon except SGLD, which draws noise."""
