"""`bench.queueing` and `bench.studies.ablation`: copies of a trace, figures, and parts that are switched off."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from bench import queueing
from bench.queueing import EASY, FIFO, OURS, SHIFT_MS, STRETCH, Waits
from bench.studies import ablation


def test_a_copy_is_the_trace_moved_a_little_and_the_same_each_time() -> None:
    traced, copy = queueing.jobs_of("2869ce", 0), queueing.jobs_of("2869ce", 3)
    assert copy == queueing.jobs_of("2869ce", 3) != queueing.jobs_of("2869ce", 4)
    assert [job.at_ms for job in copy] == sorted(job.at_ms for job in copy)
    before = {job.request.job: job for job in traced}
    assert len(copy) == len(before)
    for job in copy:
        was = before[job.request.job]
        assert abs(job.at_ms - was.at_ms) <= SHIFT_MS
        assert abs(job.runs_ms - was.runs_ms) <= STRETCH * was.runs_ms + 1
    assert sum(job != before[job.request.job] for job in copy) > 500


def test_figures_are_ratios_of_each_copy_and_their_geometric_mean_over_clusters() -> None:
    def rows(mean: float) -> queueing.Rows:
        return {FIFO: Waits(9.0, 4.0, 20.0), EASY: Waits(2.0, 9.0, 9.0), OURS: Waits(mean, 3.0, 10.0)}

    found = {("a", 0): rows(1.0), ("b", 0): rows(4.0), ("a", 1): rows(2.0), ("b", 1): rows(2.0)}
    figures = queueing.figures_of(found)
    assert figures["a, mean wait / EASY's"] == [0.5, 1.0]
    assert figures["b, gangs' wait / FIFO's"] == [0.75, 0.75]
    assert figures["b, longest wait / FIFO's"] == [0.5, 0.5]
    assert figures["all clusters, mean wait / EASY's"] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("parts", [ablation.RANKING, ablation.QUEUEING], ids=["ranking", "queueing"])
def test_every_part_that_can_be_switched_off_is_there(parts: dict[str, ablation.Off]) -> None:
    for switch_off in parts.values():
        with ExitStack() as stack:
            switch_off(stack)  # raises where the name that it replaces is gone
