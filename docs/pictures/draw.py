"""Draw the pictures of the concepts, in the folder of this file: python docs/pictures/draw.py"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
  .small { font-size: 12px; fill: #57606a } .left { text-anchor: start } .head { font-weight: 600 }
  .code { font-family: ui-monospace, monospace; font-size: 13px }
  .worker { fill: #dbeafe; stroke: #2563eb } .server { fill: #dcfce7; stroke: #16a34a }
  .plain { fill: #f3f4f6; stroke: #9ca3af } .wait { fill: none; stroke: #9ca3af; stroke-dasharray: 4 3 }
  .frame { fill: none; stroke: #d0d7de } path { fill: none; stroke: #57606a; stroke-width: 1.5 } .tip { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9da7b3 }
    .worker { fill: #1e3a5f; stroke: #60a5fa } .server { fill: #14402a; stroke: #4ade80 }
    .plain { fill: #2d333b; stroke: #768390 } .frame { stroke: #444c56 }
    path { stroke: #9da7b3 } .tip { fill: #9da7b3 }
  }
"""


class Picture:
    """An SVG of a size, to which shapes are added."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title, self._parts = (width, height), title, list[str]()

    def box(self, x: int, y: int, width: int, height: int, kind: str, *lines: str) -> None:
        """Add a rectangle of a kind with lines of text in its middle, the first of them bold where there are more."""
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        top = y + height / 2 - 8.5 * (len(lines) - 1) + 5
        for at, line in enumerate(lines):
            self.text(x + width // 2, int(top + 17 * at), line, "head" if at == 0 and len(lines) > 1 else "")

    def text(self, x: int, y: int, line: str, kind: str = "") -> None:
        """Add a line of text."""
        self._parts.append(f'<text x="{x}" y="{y}" class="{kind}">{escape(line)}</text>')

    def arrow(self, *points: tuple[int, int], both: bool = False) -> None:
        """Add an arrow through points."""
        way = " L ".join(f"{x} {y}" for x, y in points)
        start = ' marker-start="url(#tip)"' if both else ""
        self._parts.append(f'<path d="M {way}" marker-end="url(#tip)"{start}/>')

    def line(self, *points: tuple[int, int]) -> None:
        """Add a line through points."""
        self._parts.append(f'<path d="M {" L ".join(f"{x} {y}" for x, y in points)}"/>')

    def save(self, name: str) -> None:
        """Write the picture beside this file."""
        width, height = self._size
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="tip" style="stroke: none" d="M 0 0 L 8 4 L 0 8 z"/></marker>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">\n<title>{escape(self._title)}</title>\n<style>{STYLE}</style>\n'
            f"<defs>{tip}</defs>"
        )
        (Path(__file__).parent / name).write_text(
            "\n".join([head, *self._parts, "</svg>", ""]), encoding="utf-8"
        )


def stores() -> None:
    """Where gradients meet: in one process, over ranks, on servers."""
    picture = Picture(900, 300, "Where gradients meet with each kind of store")
    for x, title, note in (
        (10, '"local", "device"', "one process"),
        (310, '"device" in torch.distributed', "ranks, no servers"),
        (610, '"dist_sync" and others', "workers and servers"),
    ):
        picture.box(x, 10, 280, 280, "frame")
        picture.text(x + 140, 36, title, "code")
        picture.text(x + 140, 56, note, "small")
    picture.box(80, 110, 140, 90, "worker", "your process", "loop, gradients,", "weights, optimizer")
    for x in (335, 465):
        picture.box(x, 90, 100, 70, "worker", f"rank {0 if x == 335 else 1}", "weights,", "optimizer")
    picture.arrow((435, 125), (465, 125), both=True)
    picture.text(450, 190, "gradients are summed between ranks:", "small")
    picture.text(450, 208, "in shared memory on one host,", "small")
    picture.text(450, 226, "else by gloo or NCCL", "small")
    for x, name in ((635, "worker 0"), (765, "worker 1")):
        picture.box(x, 80, 100, 46, "worker", name, "loop")
    for x, name in ((635, "server 0"), (765, "server 1")):
        picture.box(x, 210, 100, 62, "server", name, "weights 1/2,", "optimizer")
    for worker in (685, 815):
        for server in (685, 815):
            picture.arrow((worker, 128), (server, 208), both=True)
    picture.text(655, 172, "gradients", "small")
    picture.text(845, 172, "weights", "small")
    picture.save("stores.svg")


def _lane(picture: Picture, y: int, name: str, bars: Sequence[tuple[int, int, str, str]]) -> None:
    picture.text(14, y + 20, name, "left")
    for x, width, kind, label in bars:
        picture.box(x, y, width, 30, kind, label)


def rounds() -> None:
    """The same three steps of a fast and a slow worker, with each consistency."""
    picture = Picture(900, 420, "Steps of a fast and a slow worker with dist_sync, dist_async and dist_ssp")
    picture.text(14, 28, "dist_sync: every step waits for all", "left head")
    fast, slow = 80, 160
    x = 110
    bars_fast, bars_slow = [], []
    for step in range(1, 5):
        bars_fast += [(x, fast, "worker", f"step {step}"), (x + fast, slow - fast, "wait", "waits")]
        bars_slow += [(x, slow, "worker", f"step {step}")]
        x += slow + 10
    _lane(picture, 42, "worker 0", bars_fast)
    _lane(picture, 82, "worker 1", bars_slow)
    picture.text(14, 158, "dist_async: nobody waits; weights have different ages", "left head")
    _lane(picture, 172, "worker 0", [(110 + 85 * at, fast, "worker", f"step {at + 1}") for at in range(8)])
    _lane(
        picture, 212, "worker 1", [(110 + 170 * at, slow + 5, "worker", f"step {at + 1}") for at in range(4)]
    )
    picture.text(
        14, 288, "dist_ssp, staleness 2: the fast one may be two steps ahead, then it waits", "left head"
    )
    fast_bars = [
        *[(110 + 85 * at, fast, "worker", f"step {at + 1}") for at in range(4)],
        (450, fast, "worker", "step 5"), (535, fast, "wait", "waits"),
        (620, fast, "worker", "step 6"), (705, fast, "wait", "waits"),
    ]  # fmt: skip
    _lane(picture, 302, "worker 0", fast_bars)
    _lane(
        picture, 342, "worker 1", [(110 + 170 * at, slow + 5, "worker", f"step {at + 1}") for at in range(4)]
    )
    picture.arrow((110, 398), (860, 398))
    picture.text(480, 415, "time", "small")
    picture.save("rounds.svg")


def one_round() -> None:
    """What happens in one synchronous step."""
    picture = Picture(900, 250, "One synchronous step")
    for y, name, kind in ((30, "worker 0", "worker"), (85, "server", "server"), (140, "worker 1", "worker")):
        picture.text(14, y + 24, name, "left")
        picture.line((95, y + 19), (880, y + 19))
        if kind == "worker":
            picture.box(110, y, 90, 38, "worker", "forward")
            picture.box(200, y, 120, 38, "worker", "backward")
            picture.box(640, y, 90, 38, "worker", "forward")
    picture.box(380, 85, 100, 38, "server", "sum")
    picture.box(490, 85, 100, 38, "server", "update")
    picture.arrow((320, 49), (375, 95))
    picture.arrow((320, 159), (375, 115))
    picture.arrow((590, 95), (638, 55))
    picture.arrow((590, 115), (638, 155))
    picture.text(352, 28, "gradients", "small")
    picture.text(615, 28, "new weights", "small")
    picture.text(480, 200, "step() begins when backward is done, and returns when the new weights are here.")
    picture.text(480, 224, "A round is applied for all workers, or fails for all of them.", "small")
    picture.save("round.svg")


def optimizer() -> None:
    """Where the optimizer runs."""
    picture = Picture(900, 260, "Where the optimizer runs")
    for x, title in (
        (10, "update_on_kvstore=True (the default with servers)"),
        (460, "update_on_kvstore=False"),
    ):
        picture.box(x, 10, 430, 240, "frame")
        picture.text(x + 215, 36, title, "code")
    picture.box(40, 90, 120, 90, "worker", "each worker", "gradients", "copy of weights")
    picture.box(280, 90, 130, 90, "server", "servers", "weights,", "optimizer, state")
    picture.arrow((162, 115), (278, 115))
    picture.arrow((278, 155), (162, 155))
    picture.text(220, 106, "gradients", "small")
    picture.text(220, 174, "new weights", "small")
    picture.text(225, 225, "State exists once, divided over the servers.", "small")
    picture.box(490, 90, 130, 90, "worker", "each worker", "weights,", "optimizer, state")
    picture.box(740, 90, 120, 90, "server", "servers", "sum of the", "gradients")
    picture.arrow((622, 115), (738, 115))
    picture.arrow((738, 155), (622, 155))
    picture.text(680, 106, "gradients", "small")
    picture.text(680, 174, "their sum", "small")
    picture.text(675, 225, "The loop may change the sum before update().", "small")
    picture.save("optimizer.svg")


def choose() -> None:
    """Which store to take."""
    picture = Picture(900, 470, "Which store to take")
    rows = (
        (20, ("One process?",), "yes", '"device"', "update in place; no servers"),
        (
            110,
            ("GPUs with NCCL,", "or no servers wanted?"),
            "yes",
            '"device" under torchrun',
            "all-reduce over the ranks",
        ),
        (
            200,
            ("Must all workers have", "equal weights?"),
            "yes",
            '"dist_sync"',
            "the default: exact, the same bits",
        ),
        (
            290,
            ("May one worker be far", "behind the others?"),
            "no",
            '"dist_ssp"',
            "nobody runs further ahead than staleness",
        ),
    )
    for y, lines, answer, store, note in rows:
        picture.box(120, y, 240, 60, "plain", *lines) if len(lines) == 1 else picture.box(
            120, y, 240, 60, "plain"
        )
        if len(lines) == 2:
            picture.text(240, y + 27, lines[0])
            picture.text(240, y + 45, lines[1])
        picture.arrow((362, y + 30), (500, y + 30))
        picture.text(430, y + 22, answer, "small")
        picture.box(502, y, 330, 60, "server")
        picture.text(667, y + 27, store, "code")
        picture.text(667, y + 46, note, "small")
        picture.arrow((240, y + 62), (240, y + 88))
        picture.text(262, y + 80, "no" if answer == "yes" else "yes", "small")
    picture.box(75, 380, 330, 60, "server")
    picture.text(240, 407, '"dist_async"', "code")
    picture.text(240, 426, "nobody waits for anybody", "small")
    picture.save("choose.svg")


if __name__ == "__main__":
    for draw in (stores, rounds, one_round, optimizer, choose):
        draw()
