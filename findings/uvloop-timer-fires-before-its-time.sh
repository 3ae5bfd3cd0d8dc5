#!/usr/bin/env bash
# Behaviour: uvloop's clock has whole milliseconds and its timers are rounded: a sleep may end up to half a millisecond before its time.
# Versions: uvloop 0.23.0, CPython 3.11 to 3.13; asyncio of the standard library beside it
# Guess: A loop never fires a timer early: after asyncio.sleep(d) at least d has passed, and loop.time() is time.monotonic().
# Seen: Of 50 sleeps of 1.4 ms most end after less than 1.4 ms with uvloop, none with asyncio; loop.time() is a whole number of milliseconds.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages uvloop==0.23.0
bounded 60 <<'EOF'
import asyncio
import time

import uvloop
from findings.verdict import verdict

SLEPT_S = 0.0014
TIMES = 50


async def look():
    """Return how many of the sleeps ended early, and whether the loop's clock has whole milliseconds."""
    loop = asyncio.get_running_loop()
    early, whole = 0, 0
    for _ in range(TIMES):
        began_s = time.monotonic()
        await asyncio.sleep(SLEPT_S)
        early += time.monotonic() - began_s < SLEPT_S
        clock_ms = loop.time() * 1000
        whole += abs(clock_ms - round(clock_ms)) < 1e-4
    return early, whole


with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    uv_early, uv_whole = runner.run(look())
with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
    own_early, own_whole = runner.run(look())
verdict(
    uv_early > 0 and uv_whole == TIMES and own_early == 0 and own_whole < TIMES,
    {"uvloop: early, whole ms": (uv_early, uv_whole), "asyncio: early, whole ms": (own_early, own_whole)},
)
EOF
