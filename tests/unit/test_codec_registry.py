"""Which codec compression_params means, and how wrong ones are named."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from kvstore_server.codec import make_codec
from kvstore_server.errors import ConfigurationError, UnknownNameError


@pytest.mark.parametrize("kind", ["none", "1bit", "2bit", "fp16", "bf16"])
def test_every_type_is_made_by_its_name_in_any_case(kind: str) -> None:
    assert make_codec({"type": kind.upper()}).spec()["type"] == kind


def test_no_params_mean_no_compression() -> None:
    assert make_codec(None).spec() == {"type": "none"}


@pytest.mark.parametrize("kind", ["1bit", "2bit"])
def test_the_threshold_is_a_half_unless_given(kind: str) -> None:
    assert make_codec({"type": kind}).spec() == {"type": kind, "threshold": 0.5}


@pytest.mark.parametrize(
    "params",
    [None, {"type": "fp16"}, {"type": "2bit", "threshold": 0.1}, {"type": "1bit", "threshold": -3}],
)
def test_a_spec_survives_json_and_rebuilds_the_codec(params: dict[str, Any] | None) -> None:
    codec = make_codec(params)
    assert make_codec(json.loads(json.dumps(codec.spec()))) == codec


def test_codecs_of_other_thresholds_differ() -> None:
    assert make_codec({"type": "2bit", "threshold": 0.1}) != make_codec({"type": "2bit", "threshold": 0.2})


def test_params_are_not_changed() -> None:
    params = {"type": "2bit", "threshold": 0.1}
    make_codec(params)
    assert params == {"type": "2bit", "threshold": 0.1}


def test_an_unknown_type_lists_the_valid_ones() -> None:
    with pytest.raises(
        UnknownNameError, match="no compression type '4bit'; known are none, 1bit, 2bit, fp16, bf16"
    ):
        make_codec({"type": "4bit"})


@pytest.mark.parametrize("params", [{}, {"threshold": 0.5}, {"type": None}, {"type": 2}])
def test_params_without_a_type_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="compression_params needs a 'type', one of none, 1bit"):
        make_codec(params)


@pytest.mark.parametrize("params", ["2bit", ["type", "2bit"], 2])
def test_params_that_are_no_mapping_are_refused(params: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a dict such as \{'type': '2bit'\}, got"):
        make_codec(params)


def test_an_unknown_entry_is_named_with_the_valid_ones() -> None:
    with pytest.raises(ConfigurationError, match="'2bit' does not take 'treshold'; it takes type, threshold"):
        make_codec({"type": "2bit", "treshold": 0.5})


@pytest.mark.parametrize("kind", ["none", "fp16", "bf16"])
def test_a_threshold_for_a_codec_without_one_is_refused(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{kind}' does not take 'threshold'; it takes type"):
        make_codec({"type": kind, "threshold": 0.5})


@pytest.mark.parametrize("threshold", [0, 0.0, -0.5, 1e-50])
def test_two_bits_need_a_threshold_above_zero(threshold: float) -> None:
    with pytest.raises(ConfigurationError, match="threshold must be greater than 0"):
        make_codec({"type": "2bit", "threshold": threshold})


@pytest.mark.parametrize("threshold", [-2.5, -0.0, 0, 1e30])
def test_one_bit_takes_any_real_threshold(threshold: float) -> None:
    assert make_codec({"type": "1bit", "threshold": threshold}).spec()["threshold"] == threshold


@pytest.mark.parametrize("threshold", [None, "0.5", True, math.nan, math.inf, 1j])
@pytest.mark.parametrize("kind", ["1bit", "2bit"])
def test_a_threshold_must_be_a_finite_number(kind: str, threshold: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"'{kind}': threshold must be a finite number, got"):
        make_codec({"type": kind, "threshold": threshold})


@pytest.mark.parametrize("kind", ["1bit", "2bit"])
def test_a_threshold_must_fit_into_float32(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="must be a number that float32 can hold, got 1e"):
        make_codec({"type": kind, "threshold": 1e300})
