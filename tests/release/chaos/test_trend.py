"""The soak's verdict on figures whose trend is known."""

from __future__ import annotations

import random

import pytest

from tests.release.chaos.trend import trend


def noisy(slope_an_hour: float, minutes: float = 20, noise: float = 0.5, seed: int = 7) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [(t, 100 + slope_an_hour * t / 3600 + rng.gauss(0, noise)) for t in range(0, int(minutes * 60), 5)]


@pytest.mark.parametrize("slope", [0.0, 2.0, 12.0, -4.0])
def test_a_slope_is_found_within_its_error(slope: float) -> None:
    found = trend(noisy(slope))
    assert found.low <= slope <= found.high
    assert found.high - found.low < 3


def test_a_single_step_is_no_slope() -> None:
    """An allocator that takes one arena more in the last minutes: least squares makes 8 MiB an hour of it."""
    step = [(float(t), 100.0 + (2.0 if t > 1100 else 0.0)) for t in range(0, 1200, 5)]
    assert trend(step).an_hour == 0
    assert trend(step).verdict(5) == "kept"


def test_a_verdict_is_given_only_where_the_error_allows_it() -> None:
    assert trend(noisy(0)).verdict(5) == "kept"
    assert trend(noisy(12)).verdict(5) == "broken"
    assert trend(noisy(5)).verdict(5) == "unclear"
    assert trend(noisy(2, minutes=1, noise=3)).verdict(5) == "unclear"


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 8 samples after the warm-up, found 3"):
        trend(noisy(0)[:3])
