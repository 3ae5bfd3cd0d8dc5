"""Whole requests through the core, few worlds here; `python -m pytest -m slow` plays more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.release.workloads.drawn import play


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 40), marks=pytest.mark.slow)], ids=["few", "many"])
def test_a_request_with_any_fields_is_accepted_or_refused_by_name(seeds: range) -> None:
    counts = Counter[str]()
    for seed in seeds:
        counts.update(play(seed))
    assert min(counts["accepted"], counts["placed"]) >= len(seeds), counts
