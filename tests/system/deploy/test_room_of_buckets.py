"""Three servers with little room: history and queues have theirs first, and buckets of tenants leave some free."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus.errors import JetStreamRefused
from moorage.bus.jetstream import JetStream
from moorage.scheduler.durable.dead_letters import DeadLetters
from moorage.scheduler.durable.queue_streams import QueueStreams, info_of
from moorage.scheduler.ledger.one_copy import try_copies
from moorage.schemas.subjects import Subjects
from tests.sites import running
from tests.system.deploy.test_three_copies import scheduler
from tests.system.live.stack import ANSWER_S
from tests.waiting import until

pytestmark = pytest.mark.slow

MIB: Final = 1024**2
GIB: Final = 1024 * MIB
SUBJECTS: Final = Subjects()
USERS: Final = "MOORAGE"
TENANTS: Final = ("acme", "beta", "delta", "gamma")
BUCKETS: Final = (
    SUBJECTS.files_bucket,
    SUBJECTS.result_bucket,
    SUBJECTS.schedules_bucket,
    SUBJECTS.checkpoints_bucket,
)


async def reserved(js: JetStream, stream: str) -> int:
    """What a stream reserves, in bytes; 0 while it does not exist."""
    info = await info_of(js, stream)
    return 0 if info is None else int(info.config["max_bytes"])


@pytest.mark.long
@pytest.mark.parametrize("replicas", [3, 1])
async def test_tenants_share_the_room_behind_the_history_and_leave_some(tmp_path: Path, replicas: int) -> None:
    """Each had room alone, and together they were promised more than there is; then none could be made smaller."""
    async with running(servers=3, room="52GB", tenants=TENANTS) as site, await site.connect("scheduler.main") as users:
        js = JetStream(users)
        async with scheduler(site, tmp_path / "log", "--replicas", str(replicas)) as made:
            # asked while a stream is being made, a server of a cluster may not answer
            told = "the bucket for checkpoints of tenants acme, beta, delta, gamma has 2048 MiB, not 32768"
            await until(lambda: told in made.words(), ANSWER_S, "all buckets")
            sizes = [[await reserved(js, f"OBJ_{of(each)}") for each in TENANTS] for of in BUCKETS]
            files, results, schedules, checkpoints = sizes
            assert (files, results, schedules) == ([4 * GIB] * 4, [GIB // 4] * 4, [GIB] * 4), made.words()
            assert checkpoints == [2 * GIB] * 4
            assert await reserved(js, SUBJECTS.history_stream) == 10 * GIB
            assert "cannot be created" not in made.words()
        async with await site.connect("ledger.main") as ledger:
            left = sum(map(sum, sizes)) // 3
            await until(lambda: fits(JetStream(ledger), replicas, left), ANSWER_S, "a quarter is left")


async def fits(js: JetStream, replicas: int, size: int) -> bool:
    await try_copies(js, SUBJECTS, replicas, size)
    return True


async def is_made(js: JetStream, config: dict[str, Any]) -> bool:
    with contextlib.suppress(JetStreamRefused):
        await js.ensure_stream(config)
        return True
    return False


async def is_full(js: JetStream) -> bool:
    try:
        await try_copies(js, SUBJECTS, 3, MIB)
    except JetStreamRefused:
        return True
    return False


async def test_a_history_without_room_is_made_once_there_is_some_and_no_bucket_before_it(tmp_path: Path) -> None:
    """Buckets that were made first would have taken its room for good."""
    async with running(servers=3, room="1GB", tenants=TENANTS) as site, await site.witness(USERS) as users:
        js = JetStream(users)
        await DeadLetters.ensure(js, SUBJECTS, 3, 60.0)
        await QueueStreams(js, SUBJECTS, 3).ensure(lambda: asyncio.sleep(0, 1))
        taken = await reserved(js, SUBJECTS.dead_letter_stream) + await reserved(js, SUBJECTS.request_stream)
        other = {"name": "OTHER", "storage": "file", "max_bytes": GIB - taken, "num_replicas": 3}
        await until(lambda: is_made(js, other), ANSWER_S, "the room is taken")
        await until(lambda: is_full(js), ANSWER_S, "all servers know so")
        async with scheduler(site, tmp_path / "log", "--replicas", "3") as made:
            told = "the ledger cannot be followed now; jobs are not affected: create stream MOORAGE_HISTORY"
            await until(lambda: told in " ".join(made.words().split()), ANSWER_S, "no room for the history")
            await js.delete_stream("OTHER")
            await until(lambda: reserved(js, SUBJECTS.history_stream), ANSWER_S, "the history")
            assert [await reserved(js, f"OBJ_{of(each)}") for of in BUCKETS for each in TENANTS] == [0] * 16
