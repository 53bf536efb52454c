"""Seeds of ranks, and random numbers that go on where they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvtrainer.errors import ConfigurationError
from kvtrainer.strategy import Agreement, Strategy
from kvtrainer.strategy.checkpoint import pack_tree, plain_copy, unpack_tree
from kvtrainer.strategy.environment import rng_state, set_rng_state
from tests.support.strategies import Make, make

__all__ = ["make"]


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    state = rng_state()
    yield
    set_rng_state(state)


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))]


def test_equal_seeds_give_equal_numbers_of_every_source(make: Make) -> None:
    found = []
    for _ in range(2):
        make(env_kwargs={"randomness": {"seed": 7}})
        found.append(draws())
    assert found[0] == found[1]
    torch.manual_seed(7)
    random.seed(7)
    assert [found[0][0], found[0][3]] == [random.random(), float(torch.rand(()))]


def test_ranks_differ_only_if_asked(make: Make) -> None:
    class Second(Strategy):
        def _meet(self) -> Agreement:
            agreement = Agreement()
            agreement.rank = 1
            return agreement

    for given, seed in (({"seed": 7}, 7), ({"seed": 7, "diff_rank_seed": True}, 8)):
        assert make(cls=Second, env_kwargs={"randomness": given}).seed == seed
    last = {"seed": 2**32 - 1, "diff_rank_seed": True}
    assert make(cls=Second, env_kwargs={"randomness": last}).seed == 0


def test_without_a_seed_one_is_drawn_and_kept(make: Make) -> None:
    first, second = make(env_kwargs=None), make(env_kwargs={"randomness": {"seed": None}})
    assert first.seed != second.seed
    assert first.randomness["seed"] is None


def test_the_dict_that_is_given_and_defaults_stay_as_they_are(make: Make) -> None:
    given: dict[str, Any] = {"seed": None}
    env = {"randomness": given}
    strategy = make(env_kwargs=env)
    strategy.randomness["seed"] = 9
    assert given == {"seed": None}
    assert strategy.randomness["seed"] is None


def test_deterministic_wins_over_cudnn_benchmark(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    try:
        make(env_kwargs={"cudnn_benchmark": True, "randomness": {"seed": 1, "deterministic": True}})
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert "cudnn_benchmark is switched off" in caplog.text
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "given", [*({"seed": seed} for seed in (-1, 2**32, 1.5, True, "1")), {"seeds": 3}, 3], ids=str
)
def test_what_cannot_be_meant_is_refused(make: Make, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"seed must be|'seed'|randomness must be a dict"):
        make(env_kwargs={"randomness": given})


def test_random_numbers_go_on_where_they_were_saved(tmp_path: Any) -> None:
    draws()
    state = rng_state()
    torch.save(plain_copy(state, "state"), tmp_path / "state.pt")
    expected = draws()
    set_rng_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draws() == expected
    set_rng_state(unpack_tree(pack_tree(state)))
    assert draws() == expected


def test_states_of_other_devices_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    state = rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)]}
    set_rng_state(state)
    assert "1 CUDA devices were saved and 0 are used" in caplog.text


def test_trees_keep_values_keys_and_bits() -> None:
    tree = {
        "a": [1, 2.5, None, True, "text", b"\x00\xff"],
        3: {"t": torch.tensor([1.5, float("nan")]), "empty": torch.zeros(0), "i": torch.arange(3)},
        "f": float("inf"),
        "nested": {"d": {"t": "no tensor"}},
    }
    found = unpack_tree(pack_tree(tree))
    assert found["a"] == tree["a"]
    assert found["f"] == float("inf")
    assert found["nested"] == tree["nested"]
    for name, value in tree[3].items():  # type: ignore[attr-defined]
        assert found[3][name].dtype == value.dtype
        assert torch.equal(found[3][name].nan_to_num(), value.nan_to_num())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_numbers_go_on_where_they_were_saved() -> None:
    device = torch.device("cuda", 0)
    state = rng_state([device])
    expected = torch.rand(3, device=device)
    set_rng_state(state, [device])
    assert torch.equal(torch.rand(3, device=device), expected)
