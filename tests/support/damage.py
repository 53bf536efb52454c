"""Damage to a file, drawn by Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def damages(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw `whole` with a bit flipped, or with some bytes cut off, inserted, deleted, cleared or swapped."""
    found, at = bytearray(whole), draw(st.integers(0, len(whole) - 1))
    count = draw(st.sampled_from([1, 4, 64]))
    kind = draw(st.sampled_from(["flip", "flip", "flip", "cut", "insert", "delete", "swap", "clear"]))
    if kind == "flip":
        found[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == "cut":
        del found[at:]
    elif kind == "insert":
        found[at:at] = draw(st.binary(min_size=1, max_size=count))
    elif kind == "delete":
        del found[at : at + count]
    elif kind == "clear":
        found[at : at + count] = bytes(len(found[at : at + count]))
    else:
        one, other = (draw(st.integers(0, len(whole) // count - 1)) * count for _ in range(2))
        found[one : one + count], found[other : other + count] = (
            found[other : other + count],
            found[one : one + count],
        )
    return bytes(found)
