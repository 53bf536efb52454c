"""What a rank sends: compressed where it is to be, small slices together, forms never mixed in one message."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import KEYS_PER_MESSAGE
from kvstore_server.protocol.control import unpack_control
from kvstore_server.protocol.frames import encode_request
from kvtrainer.comm.compressor import Compressor
from kvtrainer.comm.pushes import encode, push_batches
from kvtrainer.comm.tickets import RemoteTable, RoundItem
from kvtrainer.errors import NonFiniteGradientError


def item(name: str, codec: str = "", *, numel: int = 40, round_: int = 1, **options: bool) -> RoundItem:
    plan = make_plan([TensorSpec("k", (numel,), "float32")], 1)
    table = RemoteTable(name, plan, {0: len(name)}, round=round_)
    if codec:
        table.compressor = Compressor(make_codec({"type": codec}), plan)
    return RoundItem(table, {"float32": torch.ones(numel)}, None, **options)


def sent(items: list[RoundItem]) -> list[tuple[str, list[int]]]:
    """(codec or "", bytes of each push) of every message."""
    encoded = encode(items)
    work = [(one, one.sent_slices(0)) for one in items]
    return [
        (
            unpack_control(batch.form)["type"] if batch.form else "",
            [push.payload.nbytes for push in batch.pushes],
        )
        for batch in push_batches(work, encoded, 0)
    ]


def test_slices_of_one_codec_travel_together_and_of_several_apart() -> None:
    items = [item("a", "2bit"), item("bb", "2bit"), item("ccc"), item("dddd"), item("eeeee", "1bit")]
    assert sent(items) == [("2bit", [10, 10]), ("", [160, 160]), ("1bit", [5])]


def test_a_large_slice_is_an_own_message_of_its_own_form() -> None:
    messages = sent([item("a", "2bit"), item("bb", "fp16", numel=600_000)])
    large = [sizes for form, sizes in messages if form == "fp16"]
    assert sum(sum(sizes) for sizes in large) == 1_200_000
    assert ("2bit", [10]) in messages


def test_initial_values_are_sent_as_they_are() -> None:
    assert sent([item("a", "2bit", round_=0)]) == [("", [160])]


def test_values_that_replace_the_weights_are_sent_as_they_are() -> None:
    one = item("a", "2bit", assign=True)
    assert sent([one]) == [("", [160])]
    assert one.table.compressor is not None
    assert one.table.compressor.residuals() == {}


def test_a_veto_sends_nothing_even_if_the_gradient_cannot_be_compressed() -> None:
    one = item("a", "2bit", veto=True)
    assert one.values is not None
    one.values["float32"].fill_(float("nan"))
    assert sent([one]) == []


def test_one_gradient_that_is_not_finite_stops_all_tables_of_the_exchange() -> None:
    first, second = item("a", "2bit"), item("bb", "2bit")
    assert second.values is not None
    second.values["float32"][7] = float("inf")
    with pytest.raises(NonFiniteGradientError, match="element 7 of 40"):
        encode([first, second])
    assert all(residual(one) == {} for one in (first, second))


def residual(one: RoundItem) -> dict[int, Tensor]:
    assert one.table.compressor is not None
    return one.table.compressor.residuals()


def test_very_many_small_slices_travel_in_messages_that_servers_take() -> None:
    one = item("a", numel=1)
    work = [(one, one.sent_slices(0))] * (2 * KEYS_PER_MESSAGE + 1)
    batches = list(push_batches(work, {}, 0))
    assert [len(batch.pushes) for batch in batches] == [KEYS_PER_MESSAGE, KEYS_PER_MESSAGE, 1]
    for batch in batches:
        encode_request(m.Request(1, 2, 3, batch))
