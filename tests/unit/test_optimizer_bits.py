"""The update of a slice has the same bits however its elements are cut, grouped or shared among threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.optimizer_slices import (
    BUILT_IN,
    SHAPES,
    Curved,
    big_slice,
    empty,
    filled,
    make,
    same_bits,
    small_slice,
    update_slice,
)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
def test_bits_do_not_depend_on_the_number_of_threads(name: Any, threads: Callable[[int], None]) -> None:
    piece, optimizer = big_slice(100_003), make(name)
    results = []
    for count in (1, 3):
        threads(count)
        weight, state = filled(piece, 0), empty(piece)
        for step in range(3):
            update_slice(optimizer, piece, weight, filled(piece, step + 1), state, [optimizer.hyper])
        results.append((weight, state))
    assert torch.equal(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
def test_bits_do_not_depend_on_which_neighbours_are_updated_in_the_same_run(name: Any) -> None:
    piece, optimizer = small_slice(), make(name)
    together, apart = filled(piece, 0), filled(piece, 0)
    state, other = empty(piece), empty(piece)
    hypers = [optimizer.hyper] * len(SHAPES)
    for step in range(3):
        update_slice(optimizer, piece, together, filled(piece, step + 1), state, hypers)
        alone = [[i == j for j in range(len(SHAPES))] for i in range(len(SHAPES))]
        for present in alone if step else [[True] * len(SHAPES)]:
            update_slice(optimizer, piece, apart, filled(piece, step + 1), other, hypers, present)
    assert torch.equal(together, apart)
    assert state.steps.tolist() == other.steps.tolist() == [3] * len(SHAPES)


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
def test_bits_do_not_depend_on_where_a_key_is_cut(name: Any) -> None:
    unit, optimizer = 16, make(name)
    whole, cuts = big_slice(100 * unit), [0, 1, 2, 5, 9, 26, 57, 100]
    together, apart = filled(whole, 0), filled(whole, 0)
    state = empty(whole)
    parts = [(a * unit, big_slice((b - a) * unit)) for a, b in itertools.pairwise(cuts)]
    others = [empty(piece) for _, piece in parts]
    for step in range(3):
        grad = filled(whole, step + 1)
        for (start, piece), other in zip(parts, others, strict=True):
            at = slice(start, start + piece.length)
            update_slice(optimizer, piece, apart[at], grad[at].clone(), other, [optimizer.hyper])
        update_slice(optimizer, whole, together, grad, state, [optimizer.hyper])
    assert torch.equal(together, apart)
