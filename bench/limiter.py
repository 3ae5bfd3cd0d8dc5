"""What the limiter costs a launch and an allocation, against a driver that does next to nothing.

`python -m bench.limiter` runs the same program with and without the library in turns, and prints the difference in
nanoseconds of processor time: minimum, median and maximum of the rounds. An allocation and its free count as two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from tests.nvidia.limited import Limited, limited

CALLS = {"launch": 2_000_000, "alloc": 500_000}
WITHOUT = {"LD_PRELOAD": ""}


def measured(one: Limited, environment: dict[str, str] | None = None) -> dict[str, float]:
    """Return nanoseconds of processor time a call."""
    words = [f"bench-{what}={count}" for what, count in CALLS.items()]
    return dict(zip(CALLS, map(float, one.said(*words, environment=environment)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for title, rate in (("memory alone", 0.0), ("memory and launches", 1.0)):
        differences: dict[str, list[float]] = {what: [] for what in CALLS}
        with tempfile.TemporaryDirectory() as folder:
            one = Limited(Path(folder), limited(1 << 30))
            one.segment.set_rate(0, rate)
            one.segment.refill(0, 1e12, 1e12)
            for _ in range(rounds):
                plain, held = measured(one, WITHOUT), measured(one)
                for what in CALLS:
                    differences[what].append(held[what] - plain[what])
            one.close()
        for what, found in differences.items():
            low, middle, high = min(found), statistics.median(found), max(found)
            print(f"{title}: {what} +{low:.0f} / +{middle:.0f} / +{high:.0f} ns (min / median / max of {rounds})")


if __name__ == "__main__":
    main()
