"""Many frames over everything that decodes: `python -m tests.release.fuzz.many --frames 1000000`.

Each frame is of one target, one seed and one number, so that what escapes is shown again by one command. Ends with 1
when an exception escaped that the target does not declare, or memory grew from one half of the frames to the other.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import resource
import sys
import time
import traceback
from collections import Counter
from typing import Final, NamedTuple

from tests.release.fuzz.mutate import mutated
from tests.release.fuzz.targets import Target, samples_of, targets

#: escapes of one target that are told
TOLD_MAX: Final = 5
#: what memory may grow by over the second half of a target's frames
GROWTH_KIB_MAX: Final = 20 * 1024


class Fuzzed(NamedTuple):
    """What became of one target's frames. `escapes` are the numbers of the frames, with what escaped."""

    name: str
    frames: int
    taken: int
    refused: int
    escapes: list[tuple[int, str]]
    grown_kib: int


def payload_of(target: Target, seed: int, number: int) -> bytes:
    rng = random.Random(f"{seed}/{target.name}/{number}")
    payload = samples_of(target, rng)
    return payload if rng.random() < 0.1 else mutated(rng, payload, target.samples)


def fuzz(target: Target, seed: int, numbers: range) -> Fuzzed:
    taken = refused = 0
    escapes: list[tuple[int, str]] = []
    half_kib = 0
    for number in numbers:
        payload = payload_of(target, seed, number)
        try:
            target.read(payload)
            taken += 1
        except target.errors:
            refused += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            escapes.append((number, f"{error!r:.200} at {os.path.basename(where.filename)}:{where.lineno}"))
        if number == numbers[len(numbers) // 2]:
            gc.collect()
            half_kib = _rss_kib()
    gc.collect()
    grown_kib = _rss_kib() - half_kib
    return Fuzzed(target.name, len(numbers), taken, refused, escapes, grown_kib)


def _rss_kib() -> int:
    """What this process has in memory now (proc(5), statm)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


def _fuzz(job: tuple[str, int, int, int]) -> Fuzzed:
    name, seed, first, count = job
    target = next(target for target in targets() if target.name == name)
    return fuzz(target, seed, range(first, first + count))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.fuzz.many", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="over all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first frame of each target")
    parser.add_argument("--target", default="", help="this one alone")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    names = [target.name for target in targets() if asked.target in ("", target.name)]
    each = -(-asked.frames // len(names))
    began, done = time.monotonic(), 0
    results: list[Fuzzed] = []
    kinds: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool(asked.processes, maxtasksperchild=4) as pool:
        for found in pool.imap_unordered(_fuzz, [(name, asked.seed, asked.first, each) for name in names]):
            results.append(found)
            done += found.frames
            kinds.update(what.partition("(")[0] for _, what in found.escapes)
            print(
                f"{done:>9} frames  {found.name}: {found.taken} taken, {found.refused} refused,"
                f" {len(found.escapes)} escaped",
                flush=True,
            )
            for number, what in found.escapes[:TOLD_MAX]:
                again = f"--target {found.name!r} --seed {asked.seed} --from {number} --frames 1"
                print(f"  ESCAPED  {what}\n    python -m tests.release.fuzz.many {again}", flush=True)
            if found.grown_kib > GROWTH_KIB_MAX:
                print(f"  GREW by {found.grown_kib} KiB over the second half", flush=True)
    escaped = sum(len(found.escapes) for found in results)
    grew = [found.name for found in results if found.grown_kib > GROWTH_KIB_MAX]
    print(
        f"{done} frames over {len(results)} decoders in {time.monotonic() - began:.0f} s:"
        f" {sum(found.taken for found in results)} taken, {sum(found.refused for found in results)} refused,"
        f" {escaped} escapes, {len(grew)} that grew"
    )
    return 1 if escaped or grew else 0


if __name__ == "__main__":
    sys.exit(main())
