"""What meters cost: a member that counts its calls beside one that does not, and a leader that hears 1,000 of them.

The member that does not count has the methods of `Meter` taken out as it starts. Those of the leader are made up, of no
job: one process says for each of them once a second what a member with calls says, with counts in classes and without.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from bench.layers import SERVE, bare, pair
from bench.stack import SUBJECTS, stack
from moorage.bus.connection import Connection, connect
from moorage.calls.meter import Meter
from moorage.schemas.codec import encode
from moorage.schemas.service import BATCH_SIZES, CALL_MS, CallCounts, MemberLoad

UNCOUNTED: Final = """
import runpy
from moorage.calls.meter import Meter
for name in ("began", "finished", "failed", "batch"):
    setattr(Meter, name, lambda *_: None)
runpy.run_module("moorage.cli", run_name="__main__")
"""
TURNS: Final = 3
CALLS: Final = 200_000
SERVICES: Final = 10
MEMBERS: Final = 100
REPORTING_S: Final = 10
TENANT: Final = "bench"


async def measure() -> dict[str, float]:
    words = tuple(SERVE.split())
    counted, uncounted = [], []
    for _ in range(TURNS):
        counted.append((await pair(bare, words))["member µs"])
        uncounted.append((await pair(bare, ("-c", UNCOUNTED, *words[2:])))["member µs"])
    # the least disturbed turn of each
    return {
        "CPU µs of counting a call, alone": _counting_us(),
        "CPU µs a call, member that counts": min(counted),
        "CPU µs a call, member that does not": min(uncounted),
        "CPU of a member, counts / does not": min(counted) / min(uncounted),
        **await _leader(),
    }


def _counting_us() -> float:
    meter = Meter()
    began_s = time.process_time()
    for at in range(CALLS):
        meter.began(at % 100)
        meter.finished(at % 1000)
    return (time.process_time() - began_s) / CALLS * 1e6


async def _leader() -> dict[str, float]:
    """Return the leader's CPU while members of ten services report: with counts, without, and while none reports."""
    loads = [
        (
            SUBJECTS.member(TENANT, f"service-{at}", "load"),
            MemberLoad(f"{at}-{each}", 4, 2, 1, 3, False, 0, 0, 0, 0, 0, 0),
        )
        for at in range(SERVICES)
        for each in range(MEMBERS)
    ]
    async with stack("1x8xH100") as it, await connect(it.url, "bench members") as link:
        shares = {}
        for name, counts in (("none", None), ("without counts", False), ("with counts", True)):
            await _report(link, loads, counts, 2)  # the first frame of each member makes its row
            cpu_s, began_s = it.cpu_s("scheduler"), time.monotonic()
            await _report(link, loads, counts, REPORTING_S)
            shares[name] = (it.cpu_s("scheduler") - cpu_s) / (time.monotonic() - began_s) * 100
    each = 1 / 100 / (SERVICES * MEMBERS) * 1e6
    return {
        "1,000 members, none reports, leader's share of a core %": shares["none"],
        "1,000 members report without counts, leader's share of a core %": shares["without counts"],
        "1,000 members report, leader's share of a core %": shares["with counts"],
        "leader's CPU µs a report without counts": (shares["without counts"] - shares["none"]) * each,
        "leader's CPU µs a report": (shares["with counts"] - shares["none"]) * each,
    }


async def _report(link: Connection, loads: list[tuple[str, MemberLoad]], counts: bool | None, seconds: int) -> None:
    """Let each member say each second that it has answered more calls; None lets none say anything."""
    began_s = time.monotonic()
    first = round(began_s * 1000)
    for at in range(seconds):
        calls = first + at * 50
        classes = (calls, *[at] * len(CALL_MS))
        told = CallCounts({"500": at}, classes, classes, (at,) * (len(BATCH_SIZES) + 1)) if counts else CallCounts()
        for tenth in range(10):  # they do not all report in one turn of the leader
            if counts is not None:
                said = [
                    (where, msgspec.structs.replace(load, ended=calls, waited_ms=at, ran_ms=calls * 5, counts=told))
                    for where, load in loads[tenth::10]
                ]
                await link.send([(where, encode(load), "") for where, load in said])
            await asyncio.sleep(max(0.0, began_s + at + (tenth + 1) / 10 - time.monotonic()))
