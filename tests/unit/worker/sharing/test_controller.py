"""The controller of the limiter's tokens: the reference's numbers, digit for digit, and where it comes to rest."""

from __future__ import annotations

import pytest

from moorage.worker.sharing.limiter.controller import PASSED_S_MIN, Controller, Refill


class Tokens:
    """A bucket without processes, by the rule of the segment: given up to a capacity, and taken away by nobody else."""

    def __init__(self) -> None:
        self.level = 0.0

    def refill(self, device: int, tokens: float, capacity: float) -> float:
        self.level = max(self.level, min(self.level + tokens, capacity))
        return self.level


def test_fact_58_a_controller_begins_and_makes_its_first_step() -> None:
    made, tokens = Controller(0.7), Tokens()
    assert (made.rate, made.capacity, made.begin(tokens, 0)) == (100.0, 200.0, 200.0)
    assert made.update(0.2, 0.1, tokens.level) == pytest.approx(Refill(52.5, 200.0))
    assert made.rate == pytest.approx(525.0)
    assert made.capacity == pytest.approx(1050.0)

    again = Controller(0.7)
    again.begin(tokens, 0)
    assert again.step(tokens, 0, 0.2, 0.1) == 200.0  # the refill is capped by the capacity of before
    assert again.step(tokens, 0, 0.2, 0.1) > 200.0


def test_fact_58_what_comes_too_soon_changes_nothing() -> None:
    made, tokens = Controller(0.7), Tokens()
    made.begin(tokens, 0)
    assert made.update(0.2, PASSED_S_MIN - 0.001, 0.0) is None
    assert made.step(tokens, 0, 0.2, 0.01) == 200.0
    assert (made.rate, made.capacity, made.smoothed) == (100.0, 200.0, None)
    assert made.update(0.2, PASSED_S_MIN, 200.0) is not None


def test_fact_58_the_second_step_smooths_forgets_and_counts_from_the_level_before_the_refill() -> None:
    """By hand: 0.2 and 0.7 are smoothed to 0.35, the errors are 0.5 and 0.35, and 2,525 tokens/s were drained."""
    made = Controller(0.7)
    made.update(0.2, 0.1, 200.0)
    assert made.update(0.7, 0.1, 0.0) is not None
    assert made.smoothed == pytest.approx(0.35)
    drained = (200.0 + 525.0 * 0.1) / 0.1
    correction = 0.5 * 0.35 + 0.1 * (0.05 * 0.95 + 0.035) + 0.05 * (0.35 - 0.5) / 0.1
    assert made.rate == pytest.approx(drained * (0.7 / 0.35) * (1 + correction))


def test_an_idle_job_keeps_its_rate_but_for_the_correction() -> None:
    made = Controller(0.5)
    made.update(0.0, 0.1, 200.0)
    assert made.rate == pytest.approx(100.0 * 1.5)
    for _ in range(200):
        made.update(0.0, 0.1, 200.0)
    assert (made.rate, made.capacity) == (100_000.0, 200_000.0)


def test_the_correction_is_a_half_at_most_and_the_rate_stays_in_its_bounds() -> None:
    made = Controller(0.0)
    for _ in range(50):
        made.update(1.0, 0.1, 0.0)
    assert made.rate == 10.0


@pytest.mark.parametrize("target", [0.1, 0.3, 0.7])
def test_a_job_that_always_has_work_comes_to_its_part_of_the_device(target: float) -> None:
    """A played device does 4,000 tokens of work a second. Time is counted, not waited for."""
    made, tokens, busiest = Controller(target), Tokens(), 400.0
    made.begin(tokens, 0)
    used: list[float] = []
    for _ in range(600):
        taken = min(tokens.level, busiest)
        tokens.level -= taken
        used.append(taken / busiest)
        made.step(tokens, 0, used[-1], 0.1)
    assert sum(used[-300:]) / 300 == pytest.approx(target, abs=0.05)


@pytest.mark.parametrize("target", [-0.1, 1.1])
def test_a_target_is_a_part_of_a_device(target: float) -> None:
    with pytest.raises(ValueError, match="target must be"):
        Controller(target)
