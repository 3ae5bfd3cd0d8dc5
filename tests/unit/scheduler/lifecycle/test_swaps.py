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
    swaps.has(1, 10_000)
    swaps.left(1, 5000)
    swaps.came(1, 2500)
    swaps.has(2, 40_000)
    assert swaps.of(2) == Swap(40_000, 20_000, 10_000)
    swaps.left(2, 20_000)
    swaps.has(2, 60_000)
    assert swaps.of(2) == Swap(60_000, 30_000, 15_000), "a larger one takes longer"


def test_a_small_swap_which_takes_its_time_for_other_things_says_nothing_of_large_ones() -> None:
    swaps = Swaps()
    swaps.has(1, 40_000)
    before = swaps.of(1)
    swaps.has(2, 300)
    swaps.left(2, 3000)
    swaps.came(2, 3000)
    assert swaps.of(1) == before, "0.1 MiB a ms would be 400 s"
    assert swaps.of(2) == Swap(300, 3000, 3000)
    swaps.has(2, 40_000)
    assert swaps.of(2) == before, "nor of its own, once it has loaded its model"


def test_a_member_that_loads_its_model_leaves_what_was_measured_of_its_service() -> None:
    swaps = Swaps()
    swaps.has(1, 40_000)
    swaps.left(1, 30_000)
    swaps.came(1, 9000)
    swaps.has(1, 500)
    assert swaps.of(1) == Swap(40_000, 30_000, 9000)
    swaps.has(1, 40_000)
    assert swaps.of(1) == Swap(40_000, 30_000, 9000)


def test_a_swap_that_was_held_up_says_little_of_those_of_others() -> None:
    swaps = Swaps()
    swaps.has(1, 8192)
    usual = swaps.of(1)
    swaps.has(2, 8192)
    swaps.left(2, 600_000)
    swaps.came(2, 600_000)
    assert usual.out_ms < swaps.of(1).out_ms <= 4 * usual.out_ms + 1
    assert usual.in_ms < swaps.of(1).in_ms <= 4 * usual.in_ms + 1
    assert swaps.of(2) == Swap(8192, 600_000, 600_000)


def test_a_swap_is_forgotten_with_its_job() -> None:
    swaps = Swaps()
    swaps.has(1, 1000)
    swaps.has(2, 1000)
    swaps.keep({2})
    assert (swaps.of(1).mib, swaps.of(2).mib) == (0, 1000)
