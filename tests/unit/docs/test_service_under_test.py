"""docs/examples/service_under_test.py is run as its reader would run it: its tests are this file's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "service_under_test.py"
_SPEC = importlib.util.spec_from_file_location("service_under_test", EXAMPLE)
assert _SPEC is not None
assert _SPEC.loader is not None
example = sys.modules["service_under_test"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)

test_runs_wait_for_each_other_and_bad_ones_are_left_out = pytest.mark.slow(
    example.test_runs_wait_for_each_other_and_bad_ones_are_left_out
)
test_it_survives_a_scheduler_and_a_worker_that_die = pytest.mark.slow(
    example.test_it_survives_a_scheduler_and_a_worker_that_die
)
test_a_training_that_nobody_can_rate_is_told = example.test_a_training_that_nobody_can_rate_is_told


def test_every_test_of_the_example_is_run_here() -> None:
    tests = {name for name in vars(example) if name.startswith("test_")}
    assert tests and tests == {name for name in globals() if name.startswith("test_")} - {  # noqa: PT018
        "test_every_test_of_the_example_is_run_here"
    }
