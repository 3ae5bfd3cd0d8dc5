"""How long the swap of a service takes: by its size, by others' swaps, and as it was measured."""

from __future__ import annotations

from moorage.scheduler.core.lifecycle.swaps import Swap, Swaps


def test_a_swap_takes_as_long_as_the_last_one_of_its_service() -> None:
    swaps = Swaps()
    assert swaps.of(1) == Swap()
    swaps.has(1, 8192)
    assert 4000 < swaps.of(1).out_ms < 4500
    assert 1400 < swaps.of(1).in_ms < 1600
    swaps.left(1, 5000)
    swaps.came(1, 1000)
    assert swaps.of(1) == Swap(8192, 5000, 1000)


def test_a_swap_that_was_not_measured_takes_as_long_for_each_mib_as_the_last_one_of_others() -> None:
    swaps = Swaps()
    swaps.has(1, 1000)
    swaps.left(1, 500)
    swaps.came(1, 250)
    swaps.has(2, 4000)
    assert swaps.of(2) == Swap(4000, 2000, 1000)
    swaps.left(2, 2000)
    swaps.has(2, 6000)
    assert swaps.of(2) == Swap(6000, 3000, 1500), "a larger one takes longer"


def test_a_swap_is_forgotten_with_its_job() -> None:
    swaps = Swaps()
    swaps.has(1, 1000)
    swaps.has(2, 1000)
    swaps.keep({2})
    assert (swaps.of(1).mib, swaps.of(2).mib) == (0, 1000)
