"""Every option of a Trainer works with every store and site of the update, or is refused; the page says which."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from kvtrainer import Trainer
from tests.support.option_probes import PROBES
from tests.support.options import NOTHING_TRAVELS, WORKS, Outcomes, all_outcomes, check_probes, page

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
NOT_OPTIONS = {
    "self",
    "params",
    "optimizer",
    "optimizer_params",
    "kvstore",
    "update_on_kvstore",
    "zero_copy",
    "hierarchy",
    "overlap_pull",
}
"""Arguments that say what is trained, how, and where: each probe is tried with all of those; zero_copy changes nothing
in what comes out, hierarchy needs several workers to change the last bits of it, and overlap_pull was removed."""


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    # What is neither right nor refused at construction has failed here already.
    return all_outcomes()


def test_the_page_says_what_happens(outcomes: Outcomes) -> None:
    assert PAGE.read_text() == page(outcomes), "run: python -m tests.support.options > docs/options.md"


def test_only_what_travels_to_others_depends_on_the_store(outcomes: Outcomes) -> None:
    elsewhere = {
        case.probe.option
        for case, outcome in outcomes.items()
        if outcome != WORKS and case.probe.expected is not None
    }
    assert "overlap" in elsewhere
    assert all(
        "compression_params" in option or option.startswith("configure(")
        for option in elsewhere - {"overlap"}
    )


def test_what_has_no_effect_says_so(outcomes: Outcomes) -> None:
    silent = {case.probe.option for case, outcome in outcomes.items() if outcome == NOTHING_TRAVELS}
    assert all("compression_params" in option for option in silent)


def test_every_argument_of_the_trainer_is_tried_out() -> None:
    arguments = set(inspect.signature(Trainer.__init__).parameters) - NOT_OPTIONS
    assert arguments == {name for name in arguments if any(name in probe.option for probe in PROBES)}


def test_every_probe_would_notice_that_its_option_is_ignored() -> None:
    check_probes()
