"""kill -9 of the leader between each pair of steps of a job's life, all through one kill.

A scripted worker holds every job at the step that its name says; what comes after the restart must be the same
placement (same fence), and the end of every job, once.
"""

from __future__ import annotations

import msgspec
import pytest

from moorage.schemas.codec import encode
from tests.servers import Server
from tests.system.live.scripted_worker import ScriptedWorker, scripted_worker
from tests.system.live.stack import Caller, caller, request, stack
from tests.waiting import until

pytestmark = pytest.mark.any_server

#: jobs of host a by the reports that were answered before the kill
STEPS: dict[str, tuple[str, ...]] = {
    "placed": (),
    "claimed": ("claimed",),
    "started": ("claimed", "started"),
    "exited": ("claimed", "started", "exited"),
    "freed": ("claimed", "started", "exited", "freed"),
}
GANGS = {"gang-half": (0,), "gang-held": (0, 1)}  # which ranks were claimed before the kill
ON_A = {"requires": {"host": ["a"]}}


async def prepare(acme: Caller, a: ScriptedWorker, b: ScriptedWorker) -> None:
    """Bring every job to its step."""
    for job in (*STEPS, "cancelling", "cancel-placed"):
        assert (await acme.submit(job, **ON_A))["kind"] == "accepted"
    for job in GANGS:
        await acme.submit(job, gpu={"scheduling": "gang"}, replicas=2, **ON_A)
    for job, reports in STEPS.items():
        await a.step(job, *reports)
    for job, ranks in GANGS.items():
        for rank in ranks:
            place = await a.wants(job, rank)
            assert place.hold
            await a.tell(a.report("claimed", place, detail="10.0.0.1:29500" if rank == 0 else ""))
    await until(lambda: {start.replica for start in a.started} == {0, 1}, what="START of both ranks")
    await a.step("cancelling", "claimed", "started")
    for job in ("cancelling", "cancel-placed"):
        await a.wants(job)
        assert (await acme.api("cancel", {"job": job}))["data"]["cancelled"]
        await until(lambda job=job: any(end.job == job for end in a.ended), what=f"the end of {job}")
    # 16 GPUs in one host: only when everything else there is over
    assert (await acme.submit("queued", gpu={"count": 16}, **ON_A))["kind"] == "accepted"
    # behind jobs that end after the kill, one of which is CANCELLED then
    for job in ("started", "cancelling"):
        answer = await acme.submit(f"behind-{job}", after=[job], requires={"host": ["b"]})
        assert answer["kind"] == "accepted"
    # the durable queue: read and placed before the kill
    await acme.queue("submit", request("queue-read", **ON_A))
    await a.wants("queue-read")
    # a report that is recorded, but whose answer nobody gets: it is sent without a reply subject
    await acme.submit("fact-recorded", requires={"host": ["b"]})
    frame = b.next_frame(b.report("claimed", await b.wants("fact-recorded")))
    await b.nc.publish(b.subjects.worker("b", "fact"), encode(frame))
    await acme.reaches("fact-recorded", "CLAIMED")
    # a submit that is recorded, but whose answer nobody gets
    await acme.nc.publish(acme.subjects.api("acme", "submit"), msgspec.json.encode(request("submit-recorded", **ON_A)))
    await acme.reaches("submit-recorded", "PLACED")


@pytest.mark.slow
async def test_one_kill_between_every_pair_of_steps(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, caller(made, "beta") as beta:
        old = await made.scheduler("old")
        await acme.leader()
        async with (
            scripted_worker(acme.nc, made.subjects, "a", 16) as a,
            scripted_worker(acme.nc, made.subjects, "b", 2) as b,
            scripted_worker(acme.nc, made.subjects, "c", 2) as c,
        ):
            await prepare(acme, a, b)
            await beta.submit("read-behind-it", gpu={"model": "none such"})
            await acme.submit("fact-lost", requires={"host": ["c"]})
            lost_place = await c.wants("fact-lost")
            before = {
                job: await acme.show(job)
                for job in ("placed", "claimed", "started", "exited", "freed", "queued", "behind-started")
            }
            assert [shown["state"] for shown in before.values()] == [
                "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED", "SUCCEEDED", "QUEUED", "QUEUED",
            ]  # fmt: skip
            # the leader hears nothing of what follows: it is stopped, then killed
            old.stop()
            await acme.nc.publish(
                made.subjects.worker("c", "fact"), encode(c.next_frame(c.report("claimed", lost_place)))
            )
            await acme.nc.publish(
                acme.subjects.api("acme", "submit"), msgspec.json.encode(request("submit-lost", **ON_A))
            )
            await acme.queue("submit", request("queue-unread", **ON_A))
            unnamed = f"q{await acme.queue('submit', request(None, **ON_A))}"
            await beta.queue("cancel", {"job": "cancelled-first"})
            await beta.queue("cancel", {"job": "read-behind-it"})
            await acme.queue("cancel", {"job": "queue-cancelled"})
            await acme.queue("submit", request("queue-cancelled", **ON_A))
            await acme.nc.flush()
            await old.kill()
            seen, starts, ends = len(a.placed), len(a.started), len(a.ended)

            await made.scheduler("new")
            fleet = await acme.leader(2)
            assert fleet["leader"] == "new"
            for job, shown in before.items():
                after = await acme.show(job)
                same = ("state", "rev", "replica_states", "changes", "accepted_ledger")
                assert [after[key] for key in same] == [shown[key] for key in same], job

            # what a renewal does not show is sent again: the same placement, the same START, the same end
            await until(lambda: "placed" in {p.job for p in a.placed[seen:]}, what="the placement again")
            await until(lambda: {s.replica for s in a.started[starts:]} == {0, 1}, what="START again")
            await until(lambda: {"cancelling", "cancel-placed"} <= {e.job for e in a.ended[ends:]}, what="ends again")
            # the frame whose answer was lost is answered, and folded no second time; the lost one is folded now
            assert (await b.ask("fact", b_frame(b)))["no"] == b.no
            await c.ask("fact", c_frame(c, lost_place))
            assert (await acme.show("fact-recorded"))["rev"] == 3
            assert (await acme.submit("submit-recorded", **ON_A))["duplicate"]
            assert "duplicate" not in await acme.submit("submit-lost", **ON_A)
            await beta.reaches("read-behind-it", "CANCELLED")
            assert (await beta.submit("cancelled-first", **ON_A))["code"] == "cancelled-before"

            await a.finish("placed")
            await a.finish("claimed")
            assert not [place.job for place in b.placed if place.job.startswith("behind-")]
            await a.finish("started")
            await a.finish("exited")
            await a.finish("queue-read")
            await a.finish("submit-recorded")
            await a.finish("submit-lost")
            await a.finish("queue-unread")
            await a.finish(unnamed)
            place = await a.wants("cancelling")
            await a.tell(a.report("exited", place, -15, "end"), a.report("freed", place))
            await a.tell(a.report("withdrawn", await a.wants("cancel-placed")))
            await a.tell(a.report("claimed", await a.wants("gang-half", 1)))
            for job in GANGS:
                await until(lambda job=job: any(s.job == job for s in a.started), what=f"START of {job}")
                for rank in (0, 1):
                    await a.finish(job, rank)
            await a.finish("queued")
            await b.finish("fact-recorded")
            await b.finish("behind-started")
            await c.finish("fact-lost")

            await acme.reaches("behind-cancelling", "CANCELLED")
            cancelled = {"cancelling", "cancel-placed", "queue-cancelled", "behind-cancelling"}
            done = {*STEPS, *GANGS, "queued", "queue-read", "queue-unread", unnamed, "fact-recorded", "fact-lost"}
            for job in done | {"submit-recorded", "submit-lost", "behind-started"}:
                shown = await acme.check_history(job)
                assert shown["state"] == "SUCCEEDED", job
                assert {replica["attempt"] for replica in shown["replica_states"]} == {1}, job
                assert [change["state"] for change in shown["changes"] if change["replica"] == 0] == [
                    "PLACED", "CLAIMED", "RUNNING", *(["EXITED"] if job in GANGS else []), "SUCCEEDED",
                ], job  # fmt: skip
            for job in cancelled:
                assert (await acme.check_history(job))["state"] == "CANCELLED", job
            for worker in (a, b, c):
                for job in {place.job for place in worker.placed}:
                    for rank in (0, 1) if job in GANGS else (0,):
                        assert len(worker.fences(job, rank)) == 1, (
                            f"{job} was placed again as {worker.fences(job, rank)}"
                        )
            assert "queue-cancelled" not in {place.job for place in a.placed}
            assert all(states == states[:1] * len(states) for states in acme.ended.values()), acme.ended
            await acme.all_free()


def b_frame(b: ScriptedWorker) -> object:
    """The frame of `fact-recorded` again, as it was."""
    place = next(place for place in b.placed if place.job == "fact-recorded")
    frame = b.next_frame(b.report("claimed", place))
    b.no -= 1
    return msgspec.structs.replace(frame, no=b.no)


def c_frame(c: ScriptedWorker, place: object) -> object:
    frame = c.next_frame(c.report("claimed", place))  # type: ignore[arg-type]
    c.no -= 1
    return msgspec.structs.replace(frame, no=c.no)
