"""Many seeds, over the machine's cores: `python -m tests.release.sim.many --seeds 10000 --from 0`.

A line every few seconds says how far it is; each failing seed is told as it fails, with the command that runs it
again, and all of them once more at the end. `--stop` ends at the first. Ends with 1 when a seed failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from functools import partial
from typing import Final, NamedTuple

from tests.ceilings import BOUNDS, worlds_with
from tests.release.sim.cluster import Cluster
from tests.release.sim.wide import WideWorld
from tests.release.sim.world import World

PROGRESS_S: Final = 10.0


class Told(NamedTuple):
    """What one seed came to. `wrong` is empty when every promise held."""

    seed: int
    wrong: str
    did: Counter[str]
    records: int
    started: int


def run(seed: int, wide: bool = False, small: bool | None = None) -> Told:
    """A seed as it is, then with all bounds small, or one of the two."""
    if small is None:
        told = run(seed, wide, small=False)
        if told.wrong:
            return told
        told = run(seed, wide, small=True)
        return told._replace(wrong=told.wrong and f"{told.wrong} --small")
    with worlds_with(BOUNDS["small" if small else "usual"], Cluster):
        world, wrong = (WideWorld if wide else World)(seed), ""
    try:
        world.run()
    except AssertionError as violated:
        wrong = str(violated)
    except Exception as error:  # a defect of the simulation itself must be told with its seed, too
        wrong = f"the simulation broke: {error!r}"
    seen = world.judge.preemptions
    world.did.update({"preempted": seen.ended, "preempted and placed again": seen.ran_again})
    world.did["one began where another is frozen"] = world.judge.beside_frozen
    return Told(seed, wrong, world.did, world.judge.records, world.judge.started_attempts)


def again(seed: int, wide: bool) -> str:
    return f"python -m tests.release.sim.many --seeds 1 --from {seed}{' --wide' if wide else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.sim.many", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--stop", action="store_true", help="end at the first that fails")
    parser.add_argument("--wide", action="store_true", help="worlds with more in them, see `wide.py`")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # without it a seed is another run in every process
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.release.sim.many", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    failed: list[Told] = []
    did: Counter[str] = Counter()
    began, told_s, done, records, started = time.monotonic(), time.monotonic(), 0, 0, 0
    with multiprocessing.get_context("fork").Pool(asked.processes, maxtasksperchild=500) as pool:
        for told in pool.imap_unordered(
            partial(run, wide=asked.wide), range(asked.first, asked.first + asked.seeds), chunksize=2
        ):
            done, records, started, did = done + 1, records + told.records, started + told.started, did + told.did
            if told.wrong:
                failed.append(told)
                print(f"FAILED  {again(told.seed, asked.wide)}  # {told.wrong}", flush=True)
                if asked.stop:
                    pool.terminate()
                    break
            if time.monotonic() - told_s > PROGRESS_S or done == asked.seeds:
                told_s = time.monotonic()
                left_s = (told_s - began) / done * (asked.seeds - done)
                print(f"{done} of {asked.seeds} seeds, {len(failed)} failed, {left_s:.0f} s left", flush=True)
        else:
            pool.close()
            pool.join()
    cpu_s = sum(resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime for who in _WHOSE)
    print(f"{done} seeds, {records} ledger records, {started} attempts started, {sum(did.values())} faults")
    print(f"{time.monotonic() - began:.0f} s, {cpu_s / max(1, done):.3f} s of processor time a seed")
    print("faults: " + ", ".join(f"{name} {count}" for name, count in sorted(did.items())))
    for told in sorted(failed):
        print(f"FAILED  {again(told.seed, asked.wide)}  # {told.wrong}")
    return 1 if failed else 0


_WHOSE: Final = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)

if __name__ == "__main__":
    sys.exit(main())
