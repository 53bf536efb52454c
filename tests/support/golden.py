"""Where MXNet 2.0.0b1 ends after five updates with its default options: recorded from runs of its fused kernels.

Every run starts from START; update t (1 to 5) has the gradient `gradient(t)`. A run is recorded twice: plain, and
with RESCALED. Weights are in row-major order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

START = [[1.0, -2.0], [0.5, 3.0]]
UPDATES = 5
RESCALED: dict[str, Any] = {"rescale_grad": 0.5, "clip_gradient": 0.06}
TOLERANCE = 1e-6
"""Absolute, and relative to the recorded weight."""


class Golden(NamedTuple):
    """A recorded run: the optimizer, its options, and the weights at the end of the two versions."""

    name: str
    options: dict[str, Any]
    plain: list[float]
    rescaled: list[float]


def gradient(t: int) -> list[list[float]]:
    """The gradient of update t, which counts from 1."""
    return [[0.1 * t, -0.2], [0.3 * (-1) ** t, 0.05]]


def _row(name: str, plain: list[float], rescaled: list[float], **options: Any) -> Golden:
    decay = {} if name == "groupadagrad" else {"wd": 0.01}
    return Golden(name, {**decay, **options}, plain, rescaled)


GOLDEN: dict[str, Golden] = {
    "sgd": _row(
        "sgd",
        [0.8452098, -1.8902199, 0.5274451, 2.9600801],
        [0.9660659, -1.9600798, 0.5034931, 2.9725544],
    ),
    "sgd with momentum": _row(
        "sgd",
        [0.6703619, -1.7115114, 0.5670984, 2.8950951],
        [0.9122861, -1.895095, 0.5081744, 2.9278779],
        momentum=0.9,
    ),
    "nag": _row(
        "nag",
        [0.5491129, -1.6312518, 0.5875915, 2.8659096],
        [0.8873225, -1.8659097, 0.5108138, 2.9078131],
    ),
    "signum": _row(
        "signum",
        [0.949951, -1.949901, 0.5099747, 2.9498508],
        [0.949951, -1.949901, 0.5099747, 2.9498508],
        wd_lh=0.001,
    ),
    "ftml": _row(
        "ftml",
        [0.9905028, -1.9924293, 0.5020744, 2.9924304],
        [0.9921847, -1.99243, 0.5017779, 2.9924309],
    ),
    "dcasgd": _row(
        "dcasgd",
        [0.670572, -1.7115837, 0.5670487, 2.8950987],
        [0.9122883, -1.8950986, 0.5081741, 2.9278789],
        momentum=0.9,
    ),
    "adam": _row(
        "adam",
        [0.9951315, -1.9949998, 0.5013705, 2.9950004],
        [0.9949888, -1.9949999, 0.5011101, 2.9950004],
    ),
    "adamw": _row(
        "adamw",
        [0.9951387, -1.9949782, 0.5014293, 2.9949687],
        [0.9949794, -1.9949795, 0.5014288, 2.9949706],
    ),
    "adabelief": _row(
        "adabelief",
        [0.9942558, -1.9939643, 0.5014972, 2.9944904],
        [0.9948598, -1.9948599, 0.5013638, 2.9949992],
    ),
    "adamax": _row(
        "adamax",
        [0.9924207, -1.9899992, 0.502725, 2.9899976],
        [0.9903248, -1.9899977, 0.5021865, 2.9899967],
    ),
    "nadam": _row(
        "nadam",
        [0.9950333, -1.9959507, 0.5009817, 2.9959509],
        [0.9958344, -1.9959508, 0.5008034, 2.9959509],
    ),
    "adadelta": _row(
        "adadelta",
        [0.9760768, -1.9835716, 0.5030993, 2.9835885],
        [0.982697, -1.9835883, 0.5024565, 2.9836068],
    ),
    "adagrad": _row(
        "adagrad",
        [0.9592636, -1.9676919, 0.5078456, 2.9677072],
        [0.9666167, -1.9677072, 0.506532, 2.9677181],
    ),
    "rmsprop": _row(
        "rmsprop",
        [0.9868495, -1.9893557, 0.5025409, 2.9893568],
        [0.9890326, -1.9893571, 0.5021195, 2.9893579],
    ),
    "rmsprop centered": _row(
        "rmsprop",
        [0.9595566, -1.9654574, 0.5091119, 2.9654658],
        [0.9644569, -1.9654658, 0.508047, 2.9654715],
        centered=True,
    ),
    "ftrl": _row(
        "ftrl",
        [-0.0106842, -0.2570632, 0.1354728, 0.1187152],
        [0.0201678, -0.0849095, 0.0328256, 0.0601378],
    ),
    "lamb": _row(
        "lamb",
        [0.9897763, -1.9893521, 0.5027325, 2.989248],
        [0.9895421, -1.9894627, 0.5027211, 2.9893596],
    ),
    "lans": _row(
        "lans",
        [0.9894094, -1.989664, 0.5027814, 2.9895599],
        [0.9896647, -1.9895625, 0.5026319, 2.98946],
    ),
    "lars": _row(
        "lars",
        [0.997565, -1.9977098, 0.5006082, 2.9991674],
        [0.9987196, -1.9984586, 0.5001458, 2.9989402],
        momentum=0.9,
    ),
    "groupadagrad": _row(
        "groupadagrad",
        [0.9610049, -1.9665232, 0.5114032, 2.9924865],
        [0.9680223, -1.9662117, 0.5106711, 2.9824219],
    ),
    "test": _row(
        "test",
        [0.9845021, -1.9890022, 0.5027494, 2.996001],
        [0.9920011, -1.9940014, 0.5012497, 2.9972506],
    ),
}
"""Every optimizer of Gluon except SGLD, which draws noise."""
