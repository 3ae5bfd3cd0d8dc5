"""The leader counts the times of schedules as nats-server does: random ones, asked of the real server."""

from __future__ import annotations

import random
import time
from datetime import datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

from moorage.bus.connection import connect
from moorage.bus.jetstream import Ack, JetStream, StoredMessage, wall_seconds
from moorage.scheduler.core.ledger.schedules import Schedule
from moorage.scheduler.durable.due_times import next_due_ms
from tests.servers import Server
from tests.waiting import until

TIMES: Final = 200
ZONES: Final = (
    "UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Australia/Lord_Howe", "Asia/Kolkata",
    "Africa/Cairo", "Asia/Beirut", "Pacific/Apia", "America/St_Johns",
)  # fmt: skip


def cron_that_is_due(chance: random.Random, zone: str) -> str:
    """Return random fields that are met in some three seconds, so that the server soon says what comes after."""
    now = datetime.fromtimestamp(time.time() + 3, ZoneInfo(zone))

    def field(low: int, high: int, met: int) -> str:
        step, others = chance.randint(2, 7), sorted({met, chance.randint(low, high), chance.randint(low, high)})
        span = f"{chance.randint(low, met)}-{chance.randint(met, high)}"
        return chance.choice(["*", "*", "*/1", "?", f"*/{step},{met}", span, ",".join(map(str, others)), str(met)])

    seconds = ",".join(str((now.second + more) % 60) for more in range(4))
    rest = [(0, 59, now.minute), (0, 23, now.hour), (1, 31, now.day), (1, 12, now.month), (0, 6, now.isoweekday() % 7)]
    return " ".join([seconds, *(field(*each) for each in rest)])


async def test_the_leader_knows_the_next_run_that_nats_server_announces(nats_server: Server, unique: str) -> None:
    chance = random.Random(59)
    async with await connect(nats_server.ledger_url, "test") as connection:
        jetstream = JetStream(connection)
        stream: dict[str, Any] = {
            "name": unique, "subjects": [f"{unique}.>"], "storage": "memory", "max_msgs_per_subject": 1,
            "allow_direct": True, "allow_rollup_hdrs": True, "allow_msg_schedules": True,
        }  # fmt: skip
        await jetstream.ensure_stream(stream)
        asked: dict[str, tuple[str, str]] = {}
        for number in range(TIMES):
            zone = chance.choice(ZONES)
            cron, target = cron_that_is_due(chance, zone), f"{unique}.run.{number}"
            asked[target] = cron, zone
            headers = {"Nats-Schedule": cron, "Nats-Schedule-Target": target, "Nats-Schedule-Time-Zone": zone}
            assert isinstance(await jetstream.append(f"{unique}.wish.{number}", b"", headers), Ack), (cron, zone)

        async def all_ran() -> list[StoredMessage]:
            found = await jetstream.direct_get_batch(unique, seq=1, next_by_subject=f"{unique}.run.*")
            return found if len(found) == TIMES else []

        wrong = []
        for run in await until(all_ran, what="a run of each"):
            cron, zone = asked[run.subject]
            announced_ms = wall_seconds((run.headers or {})["Nats-Schedule-Next"]) * 1000
            counted_ms = next_due_ms(
                Schedule("t", "s", cron, zone, "skip", b"", ""), int(wall_seconds(run.stored_at) * 1000)
            )
            if counted_ms != announced_ms:
                wrong.append((cron, zone, run.stored_at, announced_ms, counted_ms))
        assert not wrong
        await jetstream.delete_stream(unique)
