"""Sinks of new weights that need no memory of servers: written in place, or to a copy."""

from __future__ import annotations

import torch

from kvtrainer.client.weight_sinks import IN_PLACE, CopyWeightSink


def test_in_place_rounds_write_where_they_are_told_and_find_nothing() -> None:
    weights = {"float32": torch.ones(3)}
    assert IN_PLACE.outs(weights) is weights
    IN_PLACE.deliver(weights, weights)
    IN_PLACE.accept(weights)
    IN_PLACE.attach()
    IN_PLACE.release()
    assert (IN_PLACE.written(), IN_PLACE.roll_back(), IN_PLACE.changes) == (set(), set(), 0)


def test_a_copy_holds_what_came_last_whatever_the_loop_writes() -> None:
    weights = {"float32": torch.ones(3), "float64": torch.zeros(2, dtype=torch.float64)}
    sink = CopyWeightSink(weights)
    outs = sink.outs(weights)
    outs["float32"].fill_(2.0)
    sink.deliver(weights, outs)
    weights["float32"].fill_(7.0)
    assert sink.outs(weights)["float32"].tolist() == [2.0] * 3
    assert weights["float64"].tolist() == [0.0] * 2


def test_weights_that_are_accepted_are_what_came_last() -> None:
    weights = {"float32": torch.ones(3)}
    sink = CopyWeightSink(weights)
    weights["float32"].fill_(7.0)
    sink.accept(weights)
    assert sink.outs(weights)["float32"].tolist() == [7.0] * 3
