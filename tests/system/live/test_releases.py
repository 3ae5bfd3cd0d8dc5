"""A scheduler of this release and workers, callers and a ledger of the ones beside it, on a real server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import Ack, JetStream
from moorage.schemas.release import RELEASE, minor_of
from tests.release.frames.recorded import NEIGHBOURS, PREFIX, RELEASES, Message, newer, recorded
from tests.release.frames.replayed import Replay
from tests.servers import Server
from tests.system.live.scripted_worker import ScriptedWorker
from tests.system.live.stack import ANSWER_S, TRY_S, caller, stack
from tests.waiting import until

pytestmark = pytest.mark.any_server

#: a worker that is played again says nothing between its frames
PATIENT = {"load_s": 60.0, "lease_s": 120.0}
#: a forecast is in an answer where it is made in time
FORESEEN = ("$.data.starts is gone", "$.data.fixes is gone")


def as_recorded(message: Message, raw: Any) -> Any:
    """As it was said, but that the worker comes from no other ledger than this one."""
    if message.words[-1] == "join":
        raw |= {"ledger": "", "reign": 0}
    return raw


def of_the_next_release(message: Message, raw: Any) -> Any:
    """What the worker says, as a later minor version might: its release, and a field more wherever one fits."""
    assert message.decode is not None
    own = minor_of(RELEASE)
    assert own is not None
    for hello in (raw, raw.get("hello", {})):
        if "release" in hello:
            hello["release"] = f"{own[0]}.{own[1] + 1}.0"
    raw = as_recorded(message, raw)
    return newer(raw, message.decode(message.with_raw(raw)))


@pytest.mark.slow
@pytest.mark.parametrize("release", NEIGHBOURS)
@pytest.mark.parametrize("change", [as_recorded, of_the_next_release])
async def test_a_recorded_worker_runs_its_jobs_again(
    nats_server: Server, unique: str, release: str, change: Any
) -> None:
    it = recorded(release)
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=PATIENT)
        await acme.leader()
        replay = Replay(acme.nc, made.subjects, it, change)
        await replay.run()
        assert not [each for each in replay.wrong if not each.endswith(FORESEEN)]
        for subject, then, now in replay.answers:
            if isinstance(then, dict) and ".request." not in subject:
                assert now["kind"] == then["kind"], (subject, now)
                assert now.get("code") == then.get("code"), (subject, now)
        listed = (await acme.api("ls", {"limit": 100}))["data"]["jobs"]
        assert {row["job"]: row["state"] for row in listed} == it.states
        shown = [(then, now) for subject, then, now in replay.answers if subject.endswith(".show") and "data" in then]
        assert len(shown) >= 3
        for then, now in shown:
            assert story(now["data"]) == story(then["data"])
        [row] = (await acme.fleet())["workers"]
        assert (row["free"], row["members"]) == (row["gpus"], 0)


if not NEIGHBOURS:  # nothing to run yet: 0.3 is recorded at its release
    del test_a_recorded_worker_runs_its_jobs_again


def story(shown: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What became of each replica, in its order; which of two replicas comes first in a record is no promise."""
    words = ("replica", "attempt", "state", "worker", "code", "why")
    revs = [change["rev"] for change in shown["changes"]]
    assert revs == list(range(1, len(revs) + 1))
    changes = sorted(shown["changes"], key=lambda change: change["replica"])
    return [tuple(change.get(word) for word in words) for change in changes]


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
async def test_a_ledger_of_a_release_before_is_led_on(nats_server: Server, unique: str, release: str) -> None:
    it = recorded(release)
    async with stack(nats_server, unique) as made, caller(made) as acme:
        async with await connect(nats_server.ledger_url, "old ledger") as connection:
            js = JetStream(connection)
            await js.ensure_stream(
                {
                    "name": made.subjects.ledger_stream,
                    "subjects": [made.subjects.ledger_all],
                    "storage": "file",
                    "retention": "limits",
                    "discard": "new",
                    "max_age": 0,
                    "deny_delete": True,
                    "allow_direct": True,
                    "num_replicas": 1,
                }
            )
            for seq, subject, data in it.ledger:
                answer = await js.append(subject.replace(PREFIX, made.subjects.prefix, 1), data)
                assert answer == Ack(made.subjects.ledger_stream, seq)
        # else it forgets, a moment later, jobs that ended a day and more before the record was made
        await made.set_scheduler("", {"finished_keep": 366 * 86400.0}, made.url, made.ledger_url)
        assert (await acme.leader(2))["epoch"] == 2
        for job, state in it.states.items():
            assert await acme.state(job) == state
        for message in it.said():
            if message.words[0] == "api" and message.words[2] == "submit" and not isinstance(message.raw, list):
                then = it.answer(message)
                assert then is not None
                data = (await acme.nc.request(made.subjects.api("acme", "submit"), message.payload, timeout=TRY_S)).data
                now = Message("", "", data).raw
                assert (now["kind"], now.get("duplicate", False)) == (then.raw["kind"], then.raw["kind"] == "accepted")
                assert now.get("ledger") == then.raw.get("ledger")


@pytest.mark.slow
@pytest.mark.parametrize("far", [-2, 2])
async def test_a_worker_too_far_away_is_told_so(nats_server: Server, unique: str, far: int) -> None:
    own = minor_of(RELEASE)
    assert own is not None
    found = f"{own[0]}.{own[1] + far}.0"
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        await acme.leader()
        worker = ScriptedWorker(acme.nc, made.subjects, "w1", 1)
        worker.hello = msgspec.structs.replace(worker.hello, release=found)
        answer = await worker.join()
        assert (answer["kind"], answer["code"], answer["found"]) == ("error", "release-apart", found)
        assert answer["allowed"] == f"{own[0]}.{own[1] - 1} to {own[0]}.{own[1] + 1}"
        assert "first every scheduler, then the workers" in answer["next"]
        assert (await acme.fleet())["workers"] == []
        worker.hello = msgspec.structs.replace(worker.hello, release=RELEASE)
        assert (await worker.join())["kind"] == "joined"
        await until(lambda: worker.session, ANSWER_S, "the session")
