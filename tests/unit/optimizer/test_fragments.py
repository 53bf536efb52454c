"""Gradients in pieces: multiplied and clipped block by block, with what lies beside them in flat memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from kvstore_server.optimizer.rows import CACHED, Cuts, Pieces, aligned_fragments

SIZES = {
    "one": [48],
    "small": [16, 32, 64],
    "several together, several alone": [CACHED // 2, CACHED // 2, 16, CACHED - 16, CACHED, 16],
    "longer than a block": [16, 2 * CACHED + 32, 16],
}


def random_pieces(sizes: list[int]) -> list[Tensor]:
    gen = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=gen) for size in sizes]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("scale", "bound", "factor"),
    [(1.0, None, 1.0), (1 / 3, None, 1.0), (1.0, 0.5, 1.0), (1 / 3, 0.2, 1.0), (1.0, None, 0.1), (1 / 3, 0.2, 0.1)],
)  # fmt: skip
def test_each_element_is_multiplied_clipped_and_multiplied_and_meets_what_lies_beside_it(
    sizes: list[int], scale: float, bound: float | None, factor: float
) -> None:
    pieces = random_pieces(sizes)
    given = torch.cat(pieces)
    want = given * scale
    want = (want if bound is None else want.clamp(-bound, bound)) * factor
    flats = torch.arange(float(len(given))), torch.zeros(len(given))
    for tensors, (places, outs) in aligned_fragments(Pieces(pieces, scale, bound), *flats, factor=factor):
        for tensor, place, out in zip(tensors, places, outs, strict=True):
            assert out.tolist() == [0.0] * len(tensor)
            assert place[0] == out.storage_offset()
            out.copy_(tensor)
    assert torch.equal(flats[1], want)
    assert torch.equal(torch.cat(pieces), given)


def test_pieces_of_several_dimensions_are_multiplied_as_they_lie() -> None:
    pieces, flat = [torch.ones(4, 8), torch.full((2, 2, 8), 2.0)], torch.zeros(64)
    for [tensor], [[place]] in aligned_fragments(Pieces(pieces, 0.5), flat):
        place.copy_(tensor)
    assert flat.tolist() == [0.5] * 32 + [1.0] * 32


def test_memory_that_is_cut_again_alike_gives_the_same_parts() -> None:
    cuts, flat = Cuts(), torch.arange(48.0)
    parts = cuts.of(flat, [16, 32])
    cuts.begin()
    assert all(one is other for one, other in zip(cuts.of(flat[:], [16, 32]), parts, strict=True))
    assert [part.tolist() for part in cuts.of(flat, [32, 16])] == [list(range(32)), list(range(32, 48))]


def test_memory_that_an_update_did_not_cut_is_let_go_by_the_next_one() -> None:
    cuts, flat = Cuts(), torch.zeros(48)
    gone = weakref.ref(flat.untyped_storage())
    cuts.of(flat, [16, 32])
    del flat
    cuts.begin()
    assert gone() is not None
    cuts.begin()
    assert gone() is None


def test_what_is_used_as_it_lies_is_not_copied() -> None:
    pieces = random_pieces(SIZES["longer than a block"])
    [(tensors, _)] = aligned_fragments(Pieces(pieces), torch.zeros(sum(map(len, pieces))))
    assert [tensor.data_ptr() for tensor in tensors] == [piece.data_ptr() for piece in pieces]


def test_a_whole_gradient_is_one_piece() -> None:
    grad, flat = torch.ones(32), torch.zeros(32)
    [([tensor], [[place]])] = aligned_fragments(grad, flat)
    assert (tensor is grad, place is flat) == (True, True)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_blocks_begin_on_lines_and_stay_in_the_cache(sizes: list[int]) -> None:
    flat = torch.zeros(sum(sizes))
    for [tensor], [[place]] in aligned_fragments(Pieces(random_pieces(sizes), 0.5), flat):
        assert 0 < len(tensor) <= CACHED
        assert place.storage_offset() % 16 == 0
