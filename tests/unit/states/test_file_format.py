"""Saved states as tensors and text: everything comes back as it was, and nothing else is taken for it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtrainer.errors import StateFileError
from kvtrainer.states.file import SavedParameter, SavedStates, pack, unpack


def saved_of(state: dict[str, Any], name: str = "w", **rest: Any) -> SavedStates:
    parameter = SavedParameter((2,), "float32", 0, state)
    return SavedStates({"name": "adam", "hyper": {"lr": 0.1}}, 7, [{"lr": 0.1}], {name: parameter}, **rest)


def there_and_back(saved: SavedStates) -> SavedStates:
    return unpack(*pack(saved))


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize(
    "name", ["layer.0.weight", "a/b", "a%2Fb", "", "ü ☃", '"quoted"', "../up", "state/w/x"]
)
def test_parameters_and_entries_may_have_any_name(name: str) -> None:
    value = torch.arange(2.0)
    back = there_and_back(saved_of({"step": 3, name: value, f"{name}/x": value + 1}, name))
    assert list(back.parameters) == [name]
    state = back.parameters[name].state
    assert state.keys() == {"step", name, f"{name}/x"}
    assert same(state[name], value)
    assert same(state[f"{name}/x"], value + 1)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3, 4)])
def test_tensors_keep_their_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    value = (10 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    assert same(there_and_back(saved_of({"entry": value})).parameters["w"].state["entry"], value)


@pytest.mark.parametrize("value", [0, 3, -1.5, 1 / 3, 5e-324, math.inf, 2**60])
def test_numbers_stay_exactly_the_numbers_they_are(value: float) -> None:
    back = there_and_back(saved_of({"entry": value})).parameters["w"].state["entry"]
    assert back == value
    assert type(back) is type(value)


def test_whatever_is_saved_beside_the_states_comes_back() -> None:
    options: list[dict[str, Any]] = [
        {"lr": 0.1, "betas": (0.9, 0.99), "clip_gradient": None, "amsgrad": True}
    ]
    parameters = {"b": SavedParameter((), "float16", 0), "a": SavedParameter((2, 3), "float64", 0)}
    extra = {"residuals": {"rank": 1, "num_workers": 2}, "loss_scaler": {"scale": 1024.0}}
    tensors = {"residuals": {"a": torch.ones(2, 3)}, "other/part": {"": torch.zeros(1)}}
    back = there_and_back(SavedStates({"name": "adam"}, 12, options, parameters, extra, tensors))
    assert (back.optimizer, back.num_update, back.groups) == ({"name": "adam"}, 12, options)
    assert (back.parameters, list(back.parameters), back.extra) == (parameters, ["b", "a"], extra)
    assert back.tensors.keys() == tensors.keys()
    assert same(back.tensors["residuals"]["a"], torch.ones(2, 3))
    assert same(back.tensors["other/part"][""], torch.zeros(1))


def test_tensors_that_are_no_rows_in_memory_are_saved_as_they_look() -> None:
    value = torch.arange(6.0).view(2, 3).t()
    assert same(there_and_back(saved_of({"entry": value})).parameters["w"].state["entry"], value)


def test_one_scalar_of_two_entries_becomes_two_scalars() -> None:
    shared = torch.tensor(2.0)
    tensors, _ = pack(saved_of({"a": shared, "b": shared}))
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == 2


def test_value_that_is_neither_tensor_nor_plain_is_refused() -> None:
    with pytest.raises(StateFileError, match="neither a tensor nor plain"):
        pack(saved_of({}, extra={"code": print}))


def test_text_of_another_program_is_not_taken_for_states() -> None:
    for metadata in ({}, {"format": "pt"}):
        with pytest.raises(StateFileError, match="of something else: save_states did not write it"):
            unpack({}, metadata)


def test_newer_format_is_refused_by_its_number() -> None:
    tensors, metadata = pack(saved_of({}))
    with pytest.raises(StateFileError, match=r"version '2' of the format, this kvtrainer reads '1'; update"):
        unpack(tensors, {**metadata, "version": "2"})


@pytest.mark.parametrize("change", ["bit", "name", "shape", "missing", "additional", "text"])
def test_any_change_of_the_contents_is_noticed(change: str) -> None:
    tensors, metadata = pack(saved_of({"entry": torch.arange(4.0)}))
    [(name, tensor)] = tensors.items()
    if change == "bit":
        tensor.view(torch.uint8)[5] ^= 1
    elif change == "name":
        tensors = {name[:-1] + "z": tensor}
    elif change == "shape":
        tensors = {name: tensor.view(2, 2)}
    elif change == "missing":
        tensors = {}
    elif change == "additional":
        tensors[name + "z"] = tensor
    else:
        metadata["content"] = metadata["content"].replace("0.1", "0.2", 1)
    with pytest.raises(StateFileError, match="do not have the checksum"):
        unpack(tensors, metadata)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["parameters"], 3),
        (["parameters", 0, "group"], 1),
        (["parameters", 0, "group"], -1),
        (["parameters", 0, "shape"], ["x"]),
        (["optimizer"], {}),
        (["optimizer", "name"], 5),
        (["groups"], [3]),
        (["num_update"], None),
    ],
)
def test_description_that_makes_no_sense_is_refused(path: list[Any], value: Any, monkeypatch: Any) -> None:
    tensors, metadata = pack(saved_of({}))
    content = json.loads(metadata["content"])
    at = content
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    monkeypatch.setattr("kvtrainer.states.file.checksum", lambda *_: "0")
    with pytest.raises(StateFileError, match="its description makes no sense"):
        unpack(tensors, {**metadata, "content": json.dumps(content), "checksum": "0"})


@pytest.mark.parametrize("name", ["state/other/entry", "state/w", "w"])
def test_tensor_of_no_known_parameter_is_refused(name: str, monkeypatch: Any) -> None:
    _, metadata = pack(saved_of({}))
    monkeypatch.setattr("kvtrainer.states.file.checksum", lambda *_: metadata["checksum"])
    with pytest.raises(StateFileError, match="its description makes no sense"):
        unpack({name: torch.zeros(2)}, metadata)
