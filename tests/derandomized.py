"""Hypothesis for all tests: the same examples every run, also where no variable CI says so, no clock in a verdict."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def derandomize() -> None:
    settings.register_profile(
        "ci",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("ci")
