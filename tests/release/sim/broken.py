"""Many worlds whose scheduler has defects: `python -m tests.release.sim.broken --seeds 200 --from 0`.

See `tests.unit.scheduler.broken_world`. With `--sites`, records of workloads and of sites with services that sleep are
taken back at random places and built again, which their judges must not notice.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from unittest import mock

from tests.ceilings import BOUNDS, worlds_with
from tests.release.workloads import sleepers
from tests.release.workloads.__main__ import failure as failure_of_workload
from tests.release.workloads.__main__ import made, same_hashes
from tests.unit.scheduler.broken_world import Forgiving, failure, forgiving


class Sleepers(sleepers.Sleepers):
    """A site that is led without defects once it comes to rest: the turns of members then count on what was seen."""

    def rest(self) -> None:
        Forgiving.percent = 0
        super().rest()


def failure_of_sites(seed: int) -> str:
    """Return what is wrong with the workload of a seed, and the site of the same seed."""
    with forgiving(seed):
        if found := failure_of_workload(made(seed)):
            return found
    with forgiving(seed, percent=5), mock.patch.object(sleepers, "Sleepers", Sleepers):
        return sleepers.failure(seed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.sim.broken", description=__doc__)
    parser.add_argument("--seeds", type=int, default=40, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--sites", action="store_true", help="workloads, and sites with services that sleep")
    asked = parser.parse_args(arguments)
    if arguments is None:
        same_hashes("tests.release.sim.broken")
    did, failed = Counter[str](), 0
    seeds = range(asked.first, asked.first + asked.seeds)
    for seed, bounds in itertools.product(seeds, BOUNDS):
        with worlds_with(BOUNDS[bounds]):
            found = failure_of_sites(seed) if asked.sites else failure(seed, did)
        if found:
            failed += 1
            found += f", bounds: {bounds}"
            print(f"FAILED  python -m tests.release.sim.broken --seeds 1 --from {seed}  # {found}", flush=True)
    did += Forgiving.raised
    worlds = len(BOUNDS) * asked.seeds
    print(f"{worlds - failed} of {worlds} worlds hold; {did.total()} failures of {len(did)} kinds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
