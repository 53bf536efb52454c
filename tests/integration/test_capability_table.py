"""Every combination of store, value, update site, compression and dtype works or is refused; the page says which.

All are tried out in the full run, else every store, value and site with one dtype each, and every compression at one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.capabilities import Case, Outcome, all_outcomes, page

PAGE = Path(__file__).parents[2] / "docs" / "capabilities.md"


WHOLE = pytest.param(True, id="all", marks=pytest.mark.full)


@pytest.fixture(scope="module", params=[pytest.param(False, id="some"), WHOLE])
def outcomes(request: pytest.FixtureRequest) -> dict[Case, Outcome]:
    # `try_out` itself asserts that what trains has the right weights, and lets through no error but the library's.
    return all_outcomes(request.param)


def test_the_page_says_what_happens(outcomes: dict[Case, Outcome]) -> None:
    assert PAGE.read_text() == page(outcomes), (
        "run: python -m tests.support.capabilities > docs/capabilities.md"
    )


def test_what_is_refused_is_refused_at_construction_or_as_soon_as_it_shows(
    outcomes: dict[Case, Outcome],
) -> None:
    late = [
        case
        for case, o in outcomes.items()
        if o.where == "at the first step" and case.kind != "row-sparse gradient"
    ]
    assert not late  # only a gradient shows by itself, and not before it is there, that it has rows


@pytest.mark.parametrize("outcomes", [WHOLE], indirect=True)
def test_dtypes_make_no_difference_to_what_works(outcomes: dict[Case, Outcome]) -> None:
    by_combination: dict[tuple[object, ...], set[tuple[bool, str]]] = {}
    for case, outcome in outcomes.items():
        key = (case.place, case.kind, case.site, case.compression)
        by_combination.setdefault(key, set()).add((outcome.works, outcome.where))
    assert {key: said for key, said in by_combination.items() if len(said) > 1} == {}
