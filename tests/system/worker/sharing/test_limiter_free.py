"""What a process is told as free before it has allocated anything: what it can then take, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nvidia.limited import Limited, limited

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize("route", ["link", "proc"])
def test_free_memory_is_without_the_context_before_the_first_allocation_too(tmp_path: Path, route: str) -> None:
    one = Limited(tmp_path, limited(GIB, context_bytes=256 * MIB))
    try:
        free = GIB - 256 * MIB
        words = ("info", f"alloc={free + 1}", f"alloc={free}", "info", "alloc=1")
        assert one.said(*words, route=route) == [f"{free} of {GIB}", "2", "0", f"0 of {GIB}", "2"]
        assert one.said("alloc=1", "free=0", "info") == ["0", "0", f"{free} of {GIB}"], "as after an allocation"
    finally:
        one.close()


def test_nothing_is_free_where_the_context_does_not_fit(tmp_path: Path) -> None:
    one = Limited(tmp_path, limited(100 * MIB, context_bytes=256 * MIB))
    try:
        assert one.said("info", "alloc=1", "info") == [f"0 of {100 * MIB}", "2", f"0 of {100 * MIB}"]
    finally:
        one.close()
