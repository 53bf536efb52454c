"""Figures of what the examples have found, from their results in JSON (`--out`).

    python examples/plots.py examples/results docs/figures

`make figures` runs the examples anew and then this. Needs matplotlib (`pip install 'kvtrainer[plots]'`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy
from common import read
from matplotlib import pyplot
from plots_jobs import flights, stream, uneven

STYLE = {
    "figure.figsize": (7.5, 3.2),
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvtrainer",
}


def digits(folder: Path) -> None:
    """Accuracy after each epoch beside that of a plain PyTorch loop."""
    found, epochs = read(folder, "digits"), range(1, 26)
    pyplot.plot(epochs, found["plain_pytorch"], "o", mfc="none", ms=8, label="plain PyTorch, one process")
    pyplot.plot(epochs, found["accuracy"], ".-", label="2 workers, 2 servers")
    pyplot.plot(epochs, read(folder, "lightning")["accuracy"], "x--", alpha=0.6, label="Lightning")
    pyplot.gca().set(xlabel="epoch", ylabel="held-out accuracy")
    pyplot.legend()


def ray(folder: Path) -> None:
    """Accuracy after each epoch of a job that lost an actor, beside that of a plain PyTorch loop."""
    found, epochs = read(folder, "ray"), range(1, 26)
    plain = read(folder, "digits")["plain_pytorch"]
    pyplot.plot(epochs, plain, "o", mfc="none", ms=8, label="plain PyTorch, one process")
    again = found["starts"][1]
    pyplot.plot(epochs[:again], found["accuracy"][:again], ".-", label="on Ray, until an actor is killed")
    pyplot.plot(epochs[again:], found["accuracy"][again:], ".-", label="on Ray, started again")
    pyplot.axvline(again + 0.5, color="gray", ls="--")
    pyplot.gca().set(xlabel="epoch", ylabel="held-out accuracy")
    pyplot.legend()


def characters(folder: Path) -> None:
    """Bits a character by step, and what guessing by counts costs."""
    found = read(folder, "characters")
    bits, every = found["bits"], 20
    means = [sum(bits[at : at + every]) / every for at in range(0, len(bits), every)]
    pyplot.plot([every * (at + 0.5) for at in range(len(means))], means, label="training, means of 20 steps")
    pyplot.plot(len(bits), found["held_out"], "o", label=f"held out: {found['held_out']:.2f}")
    label = f"held out, by counts of pairs: {found['by_counts']:.2f}"
    pyplot.axhline(found["by_counts"], color="gray", ls="--", label=label)
    pyplot.gca().set(xlabel="step", ylabel="bits a character")
    pyplot.legend()


def embeddings(folder: Path) -> None:
    """Loss by step beside that of a plain PyTorch loop, and what guessing by frequency costs."""
    found = read(folder, "embeddings")
    steps = [found["every"] * (at + 1) for at in range(len(found["loss"]))]
    pyplot.plot(steps, found["plain_pytorch"], "o", mfc="none", ms=8, label="plain PyTorch, one process")
    pyplot.plot(steps, found["loss"], ".-", label="2 workers, 2 servers")
    label = f"guessing by frequency: {found['by_frequency']:.2f}"
    pyplot.axhline(found["by_frequency"], color="gray", ls="--", label=label)
    pyplot.gca().set(xlabel="step", ylabel="loss of a guessed word")
    pyplot.legend()


def gan(folder: Path) -> None:
    """Digits that were drawn, and how good they were meanwhile."""
    found = read(folder, "gan")
    _, (left, right) = pyplot.subplots(1, 2, width_ratios=(1.6, 1))
    tiles = numpy.pad(numpy.array(found["images"]).reshape(4, 10, 8, 8), ((0, 0), (0, 0), (1, 1), (1, 1)))
    left.imshow(tiles.transpose(0, 2, 1, 3).reshape(40, 100), cmap="gray_r")
    left.set_axis_off()
    epochs, read_right, distances = zip(*found["seen"], strict=True)
    right.plot(epochs, distances, "o-", label="distance from real digits")
    right.set(xlabel="epoch", yscale="log", ylim=(0.3, 200))
    right.plot(epochs, [100 * share for share in read_right], "s-", label="% read as asked for")
    right.legend(loc="lower left")


def cnn(folder: Path) -> None:
    """Accuracy by epoch, and the learning rate by step."""
    found = read(folder, "cnn")
    _, (left, right) = pyplot.subplots(1, 2)
    left.plot(range(1, len(found["accuracy"]) + 1), found["accuracy"], "o-")
    left.set(xlabel="epoch", ylabel="held-out accuracy")
    right.plot(range(1, len(found["lr"]) + 1), found["lr"], color="C1")
    right.set(xlabel="step", ylabel="learning rate")


def main() -> None:
    results, figures = map(Path, sys.argv[1:])
    matplotlib.use("Agg")
    pyplot.rcParams.update(STYLE)
    figures.mkdir(parents=True, exist_ok=True)
    for draw in (digits, ray, flights, stream, embeddings, cnn, gan, characters, uneven):
        pyplot.figure()
        draw(results)
        pyplot.savefig(figures / f"{draw.__name__}.svg", metadata={"Date": None})
        pyplot.close("all")


if __name__ == "__main__":
    main()
