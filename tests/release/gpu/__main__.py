"""`python -m tests.release.gpu`: what a real GPU shows, in one command that needs the driver and Python, and no
network.

It starts `moorage up` on this host's GPUs in a folder of its own, runs each check, and prints the rows that
docs/unseen.md is to get. Nothing else may use the GPUs meanwhile. It ends within eight minutes: what is left by then is
told as not tried. Exit code 0 if no check failed, 1 if one did, 2 if there is no GPU.

On a host without network: install into a folder where there is one, with the same release of Python, and bring it along
with the clone: `pip install --target site '.[server]'`, then there
`PATH=$PWD/site/bin:$PATH PYTHONPATH=site python3 -m tests.release.gpu`, where site/bin has the nats-server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import time
import traceback

from moorage.client.errors import ClientError
from tests.release.gpu.checks import CHECKS, OPERATORS
from tests.release.gpu.nvidia_smi import NoGpu, fields_of
from tests.release.gpu.rig import CONTROL, Failed, Rig, Skipped, operators_rig, rig

WHOLE_S = 430.0
CHECK_S = 180.0
#: what a start of `moorage up` may take, and the cancels before its end
STARTS_S = 30.0
CANCELS_S = 10.0
NO_TIME = "no time was left"


async def made(check: str, rows: list[tuple[str, str, str]], one: Rig, left_s: float) -> None:
    """Make one check, and add its row: what, how it ended, and what was seen."""
    work = dict((*CHECKS, *OPERATORS))[check]
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(min(CHECK_S, left_s)):
            rows.append((check, "seen", await work(one)))
    except Skipped as why:
        rows.append((check, "not tried", str(why)))
    except Failed as why:
        rows.append((check, "FAILED", str(why)))
    except TimeoutError:
        rows.append((check, "FAILED", f"it did not end within {min(CHECK_S, left_s):.0f} s"))
    except Exception as error:
        traceback.print_exc()
        rows.append((check, "FAILED", f"{type(error).__name__}: {error}"))
    what, verdict, seen = rows[-1]
    print(f"{verdict:9} {time.monotonic() - began_s:5.1f} s  {what}: {seen}", file=sys.stderr, flush=True)


async def made_all(checks: list[str], rows: list[tuple[str, str, str]], one: Rig, began_s: float) -> None:
    """Make these checks, as far as there is time, and end what they leave."""
    for check in checks:
        left_s = WHOLE_S - (time.monotonic() - began_s)
        if left_s < 5:
            rows.append((check, "not tried", NO_TIME))
        else:
            await made(check, rows, one, left_s)
    with contextlib.suppress(TimeoutError, ClientError):  # `moorage up` ends what is left
        async with asyncio.timeout(CANCELS_S):
            for job in (await one.client.ls(limit=100)).jobs:
                if job.state in ("RUNNING", "FROZEN", "QUEUED"):
                    await one.client.job(job.job).cancel()


async def run(launches: int, mps: bool, only: str) -> int:
    began_s = time.monotonic()
    try:
        gpus = fields_of("name,driver_version")
    except NoGpu as no:
        print(f"no GPU: {no}", file=sys.stderr)
        return 2
    rows: list[tuple[str, str, str]] = []
    rigs = ((CHECKS, rig(launches, mps="managed" if mps else "")), (OPERATORS, operators_rig(launches)))
    for checks, opened in rigs:
        chosen = [check for check, _ in checks if only in check]
        if checks is OPERATORS and shutil.which(CONTROL) is None:
            rows += [(check, "not tried", f"{CONTROL} is not here") for check in chosen]
        elif chosen and WHOLE_S - (time.monotonic() - began_s) < STARTS_S:
            rows += [(check, "not tried", NO_TIME) for check in chosen]
        elif chosen:
            try:
                async with opened as one:
                    await made_all(chosen, rows, one, began_s)
            except Exception as error:  # `moorage up` or the MPS daemon did not come up: the rows so far count
                traceback.print_exc()
                tried = {row[0] for row in rows}
                rows += [
                    (check, "FAILED", f"{type(error).__name__}: {error}") for check in chosen if check not in tried
                ]
    name, driver = gpus[0]
    print(f"| what | on {len(gpus)} x {name}, driver {driver}, {time.strftime('%d %B %Y')} | |")
    print("| --- | --- | --- |")
    for what, verdict, seen in rows:
        print(f"| {what} | {verdict} | {seen.replace('|', '/')} |")
    print(f"in {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return int(any(verdict == "FAILED" for _, verdict, _ in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.release.gpu", description="What a real GPU shows.")
    parser.add_argument("--launches", type=int, default=20_000, help="launches of a kernel to measure")
    parser.add_argument(
        "--no-mps", action="store_true", help="no MPS: its daemons change the GPUs' compute mode meanwhile"
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="the checks whose name has these words")
    given = parser.parse_args()
    sys.exit(asyncio.run(run(given.launches, not given.no_mps, given.only)))
