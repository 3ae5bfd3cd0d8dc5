"""A part of a GPU in TFLOPS."""

from __future__ import annotations

import pytest

from moorage.schemas.tflops import parse_tflops, percent_of

CAPACITIES = {"NVIDIA A100-SXM4-80GB": 312.0, "odd": 8.0, "none": 0.0}


@pytest.mark.parametrize(
    ("text", "tflops"),
    [("30", 30.0), ("1.5", 1.5), ("500m", 0.5), ("2k", 2000.0), ("2K", 2000.0), ("3M", 3e6), ("1G", 1e9), (" 7 ", 7.0)],
)
def test_what_a_text_says(text: str, tflops: float) -> None:
    assert parse_tflops(text) == pytest.approx(tflops)


@pytest.mark.parametrize("text", ["", "m", "1 G", "-1", "1T", "1e3", "nan", "1Ki", "²", "9" * 13])
def test_what_is_no_such_text(text: str) -> None:
    with pytest.raises(ValueError, match="tflops must be a number"):
        parse_tflops(text)


@pytest.mark.parametrize(
    ("tflops", "model", "percent"),
    [
        (78.0, "NVIDIA A100-SXM4-80GB", 25),
        (312.0, "NVIDIA A100-SXM4-80GB", 100),
        (999.0, "NVIDIA A100-SXM4-80GB", 100),
        (1.0, "odd", 13),  # 12.5
        (0.0, "odd", 0),
        (None, "odd", 100),
        (1.0, "A100", 100),  # the whole name
        (1.0, "none", 100),
    ],
)
def test_fact_54_the_part_of_a_model_in_percent(tflops: float | None, model: str, percent: int) -> None:
    assert percent_of(tflops, model, CAPACITIES) == percent
