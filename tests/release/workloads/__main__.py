"""One case, step by step: `python -m tests.release.workloads --seed 17`. `--shrink` leaves out steps that do not
matter."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.ceilings import SMALL
from tests.release.workloads import plan as plans
from tests.release.workloads import reserving, stream
from tests.release.workloads.plan import Plan
from tests.release.workloads.world import World
from tests.unit.scheduler.driving import Driving


def made(seed: int) -> Plan:
    """Return the plan of a seed."""
    if seed >= reserving.RESERVING_FROM:
        return reserving.made(seed)
    return stream.made(seed) if seed >= stream.STREAM_FROM else plans.made(seed)


def world_of(plan: Plan, log: list[str] | None = None) -> World:
    return stream.Stream(plan, log) if plan.theme == stream.THEME else World(plan, log)


def failure(plan: Plan, log: list[str] | None = None, world: World | None = None) -> str:
    """What is wrong with a case, in one line; empty where nothing is."""
    try:
        (world or world_of(plan, log)).run()
    except Exception as error:  # whatever the core raises is the finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        if log is not None:
            log += traceback.format_exc().splitlines()[-8:]
        said = str(error) if isinstance(error, AssertionError) and str(error) else f"{type(error).__name__}: {error}"
        return f"{said} ({Path(where.filename).name}:{where.lineno})"
    return ""


def shrink(plan: Plan, seconds: float = 60.0) -> Plan:
    """A plan of fewer steps that fails in the same place: they are left out by halves, quarters, and so on."""
    until, size, where = time.monotonic() + seconds, len(plan.steps) // 2, failure(plan).rpartition(" (")[2]
    while size and time.monotonic() < until:
        at = 0
        while at < len(plan.steps) and time.monotonic() < until:
            less = plan._replace(steps=plan.steps[:at] + plan.steps[at + size :])
            if failure(less).endswith(where):  # as before, not in another way
                plan = less
            else:
                at += size
        size //= 2
    return plan


def same_hashes(module: str) -> None:
    """Begin this program anew where text has other hashes in every process: a seed is one case everywhere."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.workloads", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--shrink", action="store_true", help="first leave out what does not matter, for a minute")
    parser.add_argument("--small", action="store_true", help="with all bounds small, see `tests.ceilings`")
    asked = parser.parse_args(arguments)
    if arguments is None:
        same_hashes("tests.release.workloads")
    if asked.small:
        Driving.ceilings = SMALL
    plan = made(asked.seed)
    if asked.shrink and failure(plan):
        plan = shrink(plan)
    log: list[str] = []
    wrong = failure(plan, log)
    print(f"seed {plan.seed}, {plan.theme}, small bounds: {plan.small}, settings: {plan.settings}")
    print("\n".join(log))
    print(f"\nFAILED: {wrong}" if wrong else "\nevery promise held")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
