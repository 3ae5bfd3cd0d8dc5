"""`SimFleet`: a service tested against the real scheduler and the real agents, in virtual time and in real time."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import msgspec
import pytest

from moorage.bus.transport import Delivery
from moorage.client import (
    AsyncClient,
    AsyncJob,
    BatchRejected,
    Gpu,
    GpuSpec,
    JobFailed,
    JobInfo,
    NoScheduler,
    Rejected,
    TimedOut,
)
from moorage.client.answers import PlanInfo
from moorage.client.events import Change, Claimed, Ended, Placed, Progress, Queued, Running, Step, Submitted
from moorage.client.fleet import FLEET_FRAMES_MAX
from moorage.client.output import TAIL_LINES
from moorage.client.steps import step_of
from moorage.scheduler.core.config import Config
from moorage.schemas.frames import Hello
from moorage.schemas.job import STATES
from moorage.testing import Ran, SimFleet, SimulatedClock, Task
from moorage.testing.bus.bus import FaultyNetwork
from moorage.worker import HandlerContext
from moorage.worker.drivers.handler.call import Handler
from tests.scenes import in_virtual_time
from tests.waiting import until, until_state


def say_devices(task: Task) -> Ran:
    return Ran(out=f"{task.env['MOORAGE_GPU_UUIDS']}\n", seconds=1)


@in_virtual_time
async def test_a_worker_that_is_forgotten_is_so_although_nothing_else_happens() -> None:
    def lasts(task: Task) -> Ran:
        return Ran(seconds=50)

    async with SimFleet("2x4xH100", script=lasts) as fleet, AsyncClient(transport=fleet) as moorage:
        job = await moorage.submit(["true"], job="check", each_worker="once")
        await until_state(job, "RUNNING")
        await fleet.kill_worker("sim-0001")
        await asyncio.sleep(600)
        replicas = (await job.show()).replicas
        assert replicas is not None
        assert replicas.states == {"SUCCEEDED": 1, "QUEUED": 1}
        await moorage.fleet.forget("sim-0001")
        await asyncio.sleep(10)
        replicas = (await job.show()).replicas
        assert replicas is not None
        assert replicas.states == {"SUCCEEDED": 1, "CANCELLED": 1}


@in_virtual_time
async def test_jobs_are_listed_by_some_ids_and_states_go_by_name() -> None:
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        for job in ("a-1", "a-2", "b-1", "c-1"):
            await moorage.submit(["true"], job=job)
        assert [row.job for row in (await moorage.ls("a-*", "c-1")).jobs] == ["c-1", "a-2", "a-1"]
        assert [row.job for row in (await moorage.ls("b-1", ids="c-*")).jobs] == ["c-1", "b-1"]
        with pytest.raises(Rejected, match="states by name"):
            await moorage.ls(["RUNNING"])  # type: ignore[arg-type]


@in_virtual_time
async def test_a_job_runs_its_script_on_its_lease() -> None:
    async with AsyncClient(transport=SimFleet("8xH100+4xL40S", script=say_devices)) as moorage:
        result = await moorage.run(["python", "train.py"], gpu="2xL40S")
        changes = result.changes
        assert [change.state for change in changes] == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
        assert (changes[1].worker, len(changes[1].gpus)) == ("sim-0001", 2)
        assert result.stdout == ",".join(changes[1].gpus) + "\n"
        assert 995 <= changes[4].time_ms - changes[3].time_ms <= 1100  # its start is told up to 2 ms later


@in_virtual_time
async def test_a_gang_that_succeeded_ended_with_0() -> None:
    gpu = GpuSpec(scheduling="gang")
    async with AsyncClient(transport=SimFleet("2x1xH100", script=say_devices)) as moorage:
        job = await moorage.submit(["torchrun"], gpu=gpu, replicas=2)
        assert ((await job.result()).code, (await job.show()).code) == (0, 0)
        assert (await moorage.run(["torchrun"], gpu=gpu, replicas=2)).code == 0
        assert [each.code for each in await moorage.wait([moorage.job(job.job)])] == [0]


@in_virtual_time
async def test_the_end_of_a_gang_names_the_rank_that_failed_first_and_the_others_as_ended_with_it() -> None:
    def one_fails(task: Task) -> Ran:
        return Ran(3, err="boom\n") if task.env["RANK"] == "1" else Ran(seconds=900, err="shutting down\n")

    async with AsyncClient(transport=SimFleet("2x1xH100", script=one_fails)) as moorage:
        job = await moorage.submit(["torchrun"], gpu=GpuSpec(scheduling="gang"), replicas=2)
        with pytest.raises(JobFailed, match="failed with code 3: gang: replica 1: exit code 3") as failed:
            await job.result()
        survivor, guilty = failed.value.failed
        assert (survivor.replica, survivor.why, survivor.stderr) == (0, "ended with replica 1", "")
        assert (guilty.replica, guilty.code, guilty.stderr) == (1, 3, "boom")


@in_virtual_time
async def test_its_output_is_there_for_whoever_asks_later() -> None:
    script = lambda task: Ran(3, out="one\ntwo\n", err="trouble\n")  # noqa: E731
    async with AsyncClient(transport=SimFleet("2xH100", script=script)) as moorage:
        job = await moorage.submit(["python", "train.py"], gpu=1)
        with pytest.raises(JobFailed):
            await job.result()
        again = moorage.job(job.job)
        assert [piece.text async for piece in again.logs()] == ["one\ntwo\n", "trouble\n"]
        assert [piece.text async for piece in again.logs(tail=1, follow=False)] == ["two\n", "trouble\n"]
        with pytest.raises(JobFailed) as failed:
            await again.result()
        assert failed.value.log_tail == "one\ntwo\ntrouble"
        assert "".join(traceback.format_exception_only(failed.value)).endswith("ends with:\n  one\n  two\n  trouble\n")


def test_a_failed_sweep_fails_in_time_whatever_becomes_of_the_question_for_its_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lacks_a_disk(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "no space left")

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        script = lambda task: Ran(3)  # noqa: E731
        async with AsyncClient(transport=SimFleet("2xH100", script=script)) as moorage:
            for failures in (lacks_a_disk, never):
                monkeypatch.setattr("moorage.client.failures.failed_replicas", failures)
                job = await moorage.submit(["x"], replicas=2)
                with pytest.raises(JobFailed) as failed:
                    await job.result(wait="30s")
                assert failed.value.failed == ()

    SimulatedClock().run(scene())


def test_warnings_of_a_submit_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> list[str]:
        async with AsyncClient(transport=SimFleet("2xH100")) as moorage:
            one = await moorage.submit(["x"], gpu="1xA100", on_no_match="wait")
            (of_batch,) = await moorage.submit_many([["x"]], gpu="1xA100", on_no_match="wait")
            with pytest.raises(TimedOut):
                await moorage.run(["x"], gpu="1xA100", job="runs", wait="1s", on_no_match="wait")
            return [one.job, of_batch.job, "runs"]

    names = SimulatedClock().run(scene())
    told = [record.getMessage() for record in caplog.records if record.name == "moorage.client"]
    assert [line.partition(": no-match: ")[0] for line in told] == [f"job {name}" for name in names]


@in_virtual_time
async def test_a_notebook_shows_a_job_and_a_client() -> None:
    async with AsyncClient(transport=SimFleet("2xH100"), tenant="vision") as moorage:
        job = await moorage.submit(["x"], gpu="1xH100", job="a")
        shown = job._repr_html_()
        assert all(f">{each}</td>" in shown for each in ("vision", "QUEUED", "1xH100"))
        assert "<caption>Job a</caption>" in shown
        assert ">vision</td>" in moorage._repr_html_()


@in_virtual_time
async def test_a_notebook_shows_lists_reasons_and_plans_as_tables() -> None:
    async with AsyncClient(transport=SimFleet("2xH100"), tenant="vision") as moorage:
        await moorage.submit(["x"], gpu="2xH100", job="hog")
        waits = await moorage.submit(["x"], gpu="1xH100", job="a")
        listed: Any = await moorage.ls()
        assert "<caption>Jobs: " in listed._repr_html_()
        assert listed._repr_html_().count("<tr>") == 3  # the head, and two jobs
        assert all(f">{each}</th>" in listed._repr_html_() for each in ("job", "state", "GPUs"))
        assert ">a</td>" in listed._repr_html_()
        explained: Any = await waits.explain()
        assert "<caption>Job a</caption>" in explained._repr_html_()
        fleet: Any = await moorage.fleet.show()
        assert "<caption>Fleet: " in fleet._repr_html_()
        assert ">never</td>" in PlanInfo(starts="never", ledger=1)._repr_html_()


@in_virtual_time
async def test_everything_says_simulated() -> None:
    fleet = SimFleet("1x2xH100", script=lambda task: Ran(seconds=5))
    assert "simulated" in repr(fleet)
    async with AsyncClient(transport=fleet) as moorage:
        assert "simulated" in repr(moorage)
        job = await moorage.submit(["x"], gpu=1)
        heard: list[Any] = []
        for subject in (
            moorage._wire.subjects.hello_all,
            moorage._wire.subjects.load_all,
            moorage._wire.subjects.fleet_frame,
        ):
            await moorage._wire.subscribe(subject, lambda delivery: heard.append(msgspec.json.decode(delivery.data)))
        events = [event async for event in job.events()]
        assert all(event.simulated for event in events if any(change.worker for change in event.changes))
        assert all(gpu.startswith("SIM-") for event in events for change in event.changes for gpu in change.gpus)
        assert all(row.simulated for row in (await moorage.ls()).jobs)
        assert all(row.simulated for row in (await moorage.fleet.show()).workers)
        assert {frame["kind"] for frame in heard} >= {"load", "fleet"}
        for frame in heard:
            assert all(row["simulated"] for row in frame.get("workers", [frame]))


@in_virtual_time
async def test_who_listens_later_hears_what_each_worker_is_too() -> None:
    """A worker said it as it started alone: a page with an observer's key showed "model not known" for ever."""
    async with AsyncClient(transport=SimFleet("1xH100+1xL40S")) as moorage:
        await moorage.run(["x"], gpu=1)
        models: dict[str, str] = {}

        def hear(delivery: Delivery) -> None:
            hello = msgspec.json.decode(delivery.data, type=Hello)
            models[hello.worker] = hello.gpu_pool[0].name

        await moorage._wire.subscribe(moorage._wire.subjects.hello_all, hear)
        await until(lambda: len(models) == 2, what="each has said it again")
        assert {name.split()[1] for name in models.values()} == {"H100", "L40S"}


@in_virtual_time
async def test_what_does_not_fit_waits_for_what_runs() -> None:
    async with AsyncClient(transport=SimFleet("1x2xH100", script=say_devices)) as moorage:
        jobs = await moorage.submit_many([["x"]] * 5, gpu="1xH100")
        assert (await jobs[-1].explain()).reason in ("busy", "placing")
        results = await moorage.wait(jobs)
        ends = [result.changes[-1].time_ms for result in results]
        assert max(ends) - min(ends) >= 1900  # three rounds of a second on two devices


@in_virtual_time
async def test_jobs_that_left_memory_are_told_whole_also_by_the_next_scheduler() -> None:
    fleet = SimFleet("8xH100", script=lambda task: Ran(code=task.attempt % 2), config=Config(ended_max=0))
    async with AsyncClient(transport=fleet) as moorage:
        jobs = [await moorage.submit(["x"], gpu=1, retries=1) for _ in range(20)]
        many = await moorage.submit(["x"], replicas=64, retries=1)
        results = await moorage.wait([*jobs, many])
        await fleet.kill_scheduler()
        for job, result in zip([*jobs, many], results, strict=True):
            shown = await until(lambda job=job: _compacted(job), what="out of memory")
            assert (shown.state, shown.code, shown.changes[-1].rev) == ("SUCCEEDED", 0, shown.rev)
            changes = [change async for event in moorage.job(job.job).events() for change in event.changes]
            assert [change.rev for change in changes] == list(range(1, shown.rev + 1))
            known = {change.rev: change for change in changes}
            assert all(known[change.rev] == change for change in result.changes)
        assert len(changes) == 1 + 64 * 8


async def _compacted(job: AsyncJob) -> JobInfo | None:
    shown = await job.show()
    return shown if shown.compacted else None


@in_virtual_time
async def test_a_gang_starts_together_and_its_ranks_know_each_other() -> None:
    tasks: list[Task] = []

    def remember(task: Task) -> Ran:
        tasks.append(task)
        return Ran(seconds=1)

    async with AsyncClient(transport=SimFleet("2x4xH100", script=remember)) as moorage:
        await moorage.run(["rank"], gpu=GpuSpec(count=4, scheduling="gang"), replicas=2)
    assert sorted(task.env["RANK"] for task in tasks) == ["0", "1"]
    assert {task.env["WORLD_SIZE"] for task in tasks} == {"2"}
    assert len({task.worker for task in tasks}) == 2


@in_virtual_time
async def test_a_script_that_raises_is_a_program_that_failed() -> None:
    def broken(task: Task) -> Ran:
        raise ValueError(f"no such data: {task.argv[0]}")

    async with AsyncClient(transport=SimFleet("1xH100", script=broken)) as moorage:
        with pytest.raises(JobFailed) as failed:
            await moorage.run(["data.csv"])
        assert failed.value.exit_code == 1
        assert "no such data: data.csv" in failed.value.result.stderr
        assert "no such data: data.csv" in failed.value.log_tail


@in_virtual_time
async def test_a_script_that_returns_no_end_is_told() -> None:
    """As one that forgot its `return`: its job would run for ever."""

    def forgets(task: Task) -> Ran:
        return cast(Ran, [None, "done"][len(task.argv) - 1])

    async with AsyncClient(transport=SimFleet("1xH100", script=forgets)) as moorage:
        for argv, said in ((["a"], "None"), (["a", "b"], "'done'")):
            with pytest.raises(JobFailed) as failed:
                await moorage.run(argv)
            assert f"a script must return a Ran, and this one returned {said}" in failed.value.log_tail


@in_virtual_time
async def test_a_worker_that_is_none_is_named_with_those_there_are() -> None:
    async with SimFleet("2x1xH100") as fleet:
        with pytest.raises(KeyError, match="no worker nope runs, but sim-0000, sim-0001"):
            await fleet.kill_worker("nope")


@in_virtual_time
async def test_a_coroutine_is_cancelled_with_its_job_and_by_its_time_limit() -> None:
    ended: list[str] = []

    async def hang(task: Task) -> Ran:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(task.job)
        raise AssertionError

    async with AsyncClient(transport=SimFleet("1xH100", script=hang)) as moorage:
        first = await moorage.submit(["x"], job="first")
        await until_state(moorage.job("first"), "RUNNING")
        await first.cancel("enough")
        with pytest.raises(JobFailed) as cancelled:
            await first.result()
        assert cancelled.value.state == "CANCELLED"
        with pytest.raises(JobFailed) as late:
            await moorage.run(["x"], job="second", limit=30.0)
        assert late.value.state == "TIMED_OUT"
        assert late.value.why == "job second ran out of time: an attempt ran for 30 s, its time limit (timeout_s)"
        assert late.value.fixes == ("allow more: --time-limit, in a request timeout_s", "moorage show second")
        with pytest.raises(JobFailed, match="over ran out of time: it was not over 45 s after its acceptance") as over:
            await moorage.run(["x"], job="over", deadline_s=45.0)  # and not that it was ended
        assert over.value.fixes[0] == "allow more: --deadline, in a request deadline_s"
        with pytest.raises(JobFailed, match=r"an attempt ran for 30 s, its time limit \(timeout_s\)"):
            await moorage.job("second").result()  # of a job that another client submitted
        held = await moorage.submit(["x"], "1xH100", job="holds")
        with pytest.raises(JobFailed, match="it had not started 20 s after its acceptance") as expired:
            await (await moorage.submit(["x"], "1xH100", job="never", start_within_s=20.0)).result()
        assert expired.value.fixes[0] == "allow more: --start-within, in a request start_within_s"
        await held.cancel()
        await moorage.submit(["x"], job="third")
        await until_state(moorage.job("third"), "RUNNING")
    assert ended == ["first", "second", "over", "holds", "third"]  # the last with the fleet


@in_virtual_time
async def test_a_retry_runs_the_script_again() -> None:
    async with AsyncClient(transport=SimFleet("1xH100", script=lambda task: Ran(int(task.attempt < 3)))) as moorage:
        result = await moorage.run(["x"], retries=5)
        assert result.changes[-1].attempt == 3


@in_virtual_time
async def test_what_was_accepted_outlives_the_scheduler() -> None:
    fleet = SimFleet("1x2xH100", script=lambda task: Ran(seconds=3))
    async with AsyncClient(transport=fleet) as moorage:
        jobs = await moorage.submit_many([["x"]] * 4, gpu=1)
        await fleet.kill_scheduler()
        with pytest.raises(NoScheduler):
            async with AsyncClient(transport=fleet, timeout="100ms") as impatient:
                await impatient.ls()
        assert {result.state for result in await moorage.wait(jobs)} == {"SUCCEEDED"}
        assert (await moorage.fleet.show()).epoch == 2


@in_virtual_time
async def test_a_job_on_a_worker_that_dies_is_placed_again() -> None:
    fleet = SimFleet("2x1xH100", script=lambda task: Ran(seconds=60))
    async with AsyncClient(transport=fleet) as moorage:
        job = await moorage.submit(["x"], gpu=1)
        await until_state(job, "RUNNING")
        await job.show()
        dead = job.worker
        await fleet.kill_worker(dead)
        result = await job.result()
        assert {change.worker for change in result.changes if change.state == "RUNNING"} == {"sim-0000", "sim-0001"}
        assert fleet.workers == [name for name in ("sim-0000", "sim-0001") if name != dead]
        await fleet.start_worker(dead)
        await until(lambda: _all_up(moorage), 60)
        with pytest.raises(KeyError):
            await fleet.start_worker(dead)


@in_virtual_time
async def test_a_worker_that_is_cut_off_ends_its_job_before_another_gets_it() -> None:
    running: set[str] = set()
    doubled: list[str] = []

    async def train(task: Task) -> Ran:
        if running:
            doubled.append(task.worker)
        running.add(task.worker)
        try:
            await asyncio.sleep(100)
        finally:
            running.discard(task.worker)
        return Ran()

    fleet = SimFleet("2x1xH100", script=train)
    async with AsyncClient(transport=fleet) as moorage:
        job = await moorage.submit(["x"], gpu=1)
        await until(lambda: running)
        fleet.cut_off(*running)
        result = await job.result()
        assert (result.state, doubled) == ("SUCCEEDED", [])
        fleet.reconnect()
        await until(lambda: _all_up(moorage), 60)


@in_virtual_time
async def test_a_job_whose_worker_was_lost_has_no_exit_code() -> None:
    """A code 0 would be taken for success."""

    async def train(_: Task) -> Ran:
        await asyncio.sleep(1_000)
        return Ran()

    fleet = SimFleet("1xH100", script=train)
    async with AsyncClient(transport=fleet) as moorage:
        job = await moorage.submit(["x"], gpu=1, retries_on_lost=0)
        await until_state(job, "RUNNING")
        await fleet.kill_worker("sim-0000")
        (result,) = await moorage.wait([job])
        assert (result.state, result.code) == ("FAILED", None)
        assert [change.code for change in result.changes if change.state == "FAILED"] == [None]
        assert (await job.show()).code is None
        assert (await moorage.ls()).jobs[0].code is None


@in_virtual_time
async def test_a_worker_that_is_cut_off_is_cut_off_from_a_later_scheduler_and_beside_others() -> None:
    fleet = SimFleet("2x1xH100")
    async with AsyncClient(transport=fleet) as moorage:
        await until(lambda: _all_up(moorage), 60)
        fleet.cut_off("sim-0000")
        fleet.cut_off("sim-0001")
        assert not fleet.network.reaches("sim-0000", "scheduler-1")
        assert not fleet.network.reaches("sim-0001", "scheduler-2"), "one that comes later"
        fleet.reconnect()
        assert fleet.network.reaches("sim-0000", "scheduler-1")


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_the_network_lose_nothing(seed: int) -> None:
    network = FaultyNetwork(seed, drop=0.03, duplicate=0.03, reorder=0.05, delay_ms=(0.1, 20))

    async def scene() -> None:
        async with AsyncClient(transport=SimFleet("2x4xH100", script=say_devices, network=network)) as moorage:
            jobs = await moorage.submit_many([["x"]] * 20, gpu=1)
            results = await moorage.wait(jobs)
            assert {result.state for result in results} == {"SUCCEEDED"}

    SimulatedClock().run(scene())
    assert network.counters["dropped"] > 0


async def test_in_real_time_it_is_there_at_once_and_leaves_nothing() -> None:
    threshold, frozen, threads = gc.get_threshold(), gc.get_freeze_count(), threading.active_count()
    fleet = SimFleet("2x8xH100")
    async with fleet, AsyncClient(transport=fleet, tenant="a") as one, AsyncClient(transport=fleet, tenant="b") as two:
        await one.submit(["x"], job="same")
        await two.submit(["y"], job="same")
        assert [len((await client.ls()).jobs) for client in (one, two)] == [1, 1]
    assert len(asyncio.all_tasks()) == 1
    assert (gc.get_threshold(), threading.active_count()) == (threshold, threads)
    assert gc.get_freeze_count() <= frozen, "what was frozen before may be gone"
    async with AsyncClient(transport=fleet) as again:  # a new fleet: the ledger went with the old one
        assert (await again.ls()).jobs == []


async def test_what_breaks_inside_is_told() -> None:
    fleet = SimFleet("1xH100")

    async def broken() -> None:
        raise OSError("the disk is on fire")

    async def use() -> None:
        async with fleet:
            assert fleet._leading is not None
            fleet._leading.cancel()
            fleet._leading = asyncio.create_task(broken())
            await asyncio.wait({fleet._leading})

    with pytest.raises(OSError, match="on fire"):
        await use()


@pytest.mark.parametrize("fields", [{"code": 300}, {"code": True}, {"seconds": -1}, {"seconds": float("inf")}])
def test_an_end_that_cannot_be_is_told(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Ran(**fields)


@pytest.mark.parametrize("fields", [{"out": b"bytes"}, {"err": None}])
def test_output_that_is_no_text_is_told(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be text"):
        Ran(**fields)


@pytest.mark.parametrize("word", ["", "8", "0xH100", "8xNothing", "300x1xH100"])
def test_a_word_that_is_no_fleet_is_told(word: str) -> None:
    with pytest.raises(Rejected) as refused:
        SimFleet(word)
    assert refused.value.code == "invalid-argument"
    assert refused.value.fixes


async def _all_up(client: AsyncClient) -> bool:
    return {row.state for row in (await client.fleet.show()).workers} == {"up"}


def transcoder(context: HandlerContext) -> dict[str, Any]:
    """A plain function, as a service has it."""
    if context.input is None:
        raise ValueError("no clip")
    context.progress(0.5, "half")
    return {"clip": context.input, "gpu": context.uuids[0], "job": context.job}


@pytest.mark.slow
@in_virtual_time
async def test_handlers_of_ones_own_are_called_and_their_results_come_back() -> None:
    async def paint(context: HandlerContext) -> bytes:
        await asyncio.sleep(3600)  # virtual
        return bytes(context.input)

    handlers: dict[str, Handler] = {"transcode": transcoder, "paint": paint}
    async with AsyncClient(transport=SimFleet("2x1xL40S+cpu", handlers=handlers)) as moorage:
        told: list[Progress] = []
        job = await moorage.submit_handler("transcode", "a.mp4", gpu="1xL40S")
        result = await job.result(on_progress=told.append)
        assert result.value == {"clip": "a.mp4", "gpu": result.changes[1].gpus[0], "job": job.job}
        assert told == [Progress(0.5, "half")]
        with pytest.raises(JobFailed, match="ValueError: no clip"):
            await (await moorage.submit_handler("transcode", gpu=1)).result()
        large = await (await moorage.submit_handler("paint", 100_000)).result()  # by the object store
        assert large.value == bytes(100_000)
        assert large.changes[-1].time_ms - large.changes[0].time_ms >= 3_600_000
        with pytest.raises(Rejected, match="no known worker could ever run this"):
            await moorage.submit_handler("sculpt", on_no_match="reject")


@in_virtual_time
async def test_of_very_many_calls_the_values_are_read_piece_by_piece_and_the_result_reads_no_history() -> None:
    count, asked = 1_100, Counter[str]()
    handlers: dict[str, Handler] = {"number": lambda context: context.replica * context.input}
    async with AsyncClient(transport=SimFleet("16x8xH100", handlers=handlers)) as moorage:
        read = moorage._wire.read

        async def counted(verb: str, arguments: Mapping[str, Any], tenant: str | None = None) -> dict[str, Any]:
            asked[verb] += 1
            return await read(verb, arguments, tenant)

        moorage._wire.read = counted  # type: ignore[method-assign]
        job = await moorage.submit_handler("number", 3, gpu=1, replicas=count)
        for handle in (job, moorage.job(job.job)):
            result = await handle.result()
            assert (result.state, result.value) == ("SUCCEEDED", None)
        assert asked["history"] == 0
        assert [pair async for pair in job.values()] == [(number, 3 * number) for number in range(count)]
        assert [pair async for pair in job.values(replica="7,1098-1099")] == [(7, 21), (1098, 3294), (1099, 3297)]
        assert asked["history"] == 0
        two = await moorage.submit_handler("number", 3, gpu=1, replicas=2)
        assert (await two.result()).value == [0, 3]
        assert [pair async for pair in two.values()] == [(0, 0), (1, 3)]


@in_virtual_time
async def test_a_handler_on_a_worker_that_dies_is_called_again_elsewhere() -> None:
    called: list[str] = []

    async def slow(context: HandlerContext) -> str:
        called.append(context.environment["MOORAGE_GPU_UUIDS"])
        await asyncio.sleep(60)
        return "done"

    fleet = SimFleet("2x1xH100", handlers={"slow": slow})
    async with AsyncClient(transport=fleet) as moorage:
        job = await moorage.submit_handler("slow", gpu=1)
        await until(lambda: called)
        await job.show()
        await fleet.kill_worker(job.worker)
        await fleet.kill_scheduler()
        assert (await job.result()).value == "done"
        assert len(set(called)) == 2
        cancelled = await moorage.submit_handler("slow", gpu=1)
        await until(lambda: len(called) == 3)
        await cancelled.cancel()
        with pytest.raises(JobFailed, match="was cancelled"):
            await cancelled.result()


def test_a_handler_without_a_name_is_told() -> None:
    with pytest.raises(Rejected, match="is not a valid handler name"):
        SimFleet(handlers={"Trans Code": transcoder})


@in_virtual_time
async def test_the_steps_of_a_job_are_types_for_match() -> None:
    history: list[str] = []
    fleet = SimFleet("1x2xH100", script=lambda task: Ran(int(task.attempt == 1), seconds=1))
    async with AsyncClient(transport=fleet) as moorage:
        job = await moorage.submit(["x"], gpu=Gpu("H100", count=2), retries=1)
        async for step in job.steps("60s"):
            match step:
                case Submitted(replica=-1):
                    history.append("submitted")
                case Queued(attempt=attempt, why=why):
                    history.append(f"queued {attempt} {why}".rstrip())
                case Placed(worker=worker, gpus=gpus):
                    history.append(f"{len(gpus)} of {worker}")
                case Claimed() | Running():
                    history.append(step.state.lower())
                case Ended(state="SUCCEEDED", code=code):
                    history.append(f"ended {code}")
    once = ["2 of sim-0000", "claimed", "running"]
    assert history == ["submitted", *once, "queued 1", *once, "ended 0"]
    assert {type(step_of(Change(1, 0, 0, 1, state))).__name__ for state in STATES} == {
        "Queued", "Placed", "Claimed", "Running", "Frozen", "Ending", "Ended",
    }  # fmt: skip
    assert type(step_of(Change(1, 0, 0, 1, "A_LATER_RELEASE_SAYS"))) is Step


@in_virtual_time
async def test_gathered_jobs_succeed_together_or_raise_the_first_failure() -> None:
    async with AsyncClient(transport=SimFleet("2x8xH100", script=lambda task: Ran(int(task.argv[0])))) as moorage:
        jobs = await moorage.submit_many([["0"]] * 5, gpu=1)
        assert [result.job for result in await moorage.gather(*jobs, wait="60s")] == [job.job for job in jobs]
        good, bad = await moorage.submit_many([["0"], ["3"]], gpu=1)
        with pytest.raises(JobFailed) as failed:
            await moorage.gather(good, bad, good)
        assert (failed.value.job, failed.value.exit_code) == (bad.job, 3)


@in_virtual_time
async def test_a_failure_carries_the_last_lines_of_its_output_and_no_more() -> None:
    lines = [f"line {number}\n" for number in range(1000)]
    async with AsyncClient(transport=SimFleet("1xH100", script=lambda _: Ran(1, "".join(lines)))) as moorage:
        for failing in (moorage.run(["x"]), (await moorage.submit(["x"])).result()):
            with pytest.raises(JobFailed) as failed:
                await failing
            assert failed.value.log_tail.splitlines() == [line.rstrip() for line in lines[-TAIL_LINES:]]


@in_virtual_time
async def test_who_reads_the_fleet_slowly_gets_only_its_newest_frames() -> None:
    loop = asyncio.get_running_loop()
    async with AsyncClient(transport=SimFleet("1xH100")) as moorage:
        frames = moorage.fleet.frames()
        await anext(frames)
        await asyncio.sleep(60.2)  # between two frames
        now_s = loop.time()
        waiting = [await anext(frames) for _ in range(FLEET_FRAMES_MAX)]
        assert loop.time() == now_s, "they were there"
        await anext(frames)
        assert loop.time() > now_s, "and no more than those"
        assert waiting[-1].ledger >= waiting[0].ledger


@in_virtual_time
async def test_what_no_worker_could_ever_run_is_refused_as_the_command_refuses_it() -> None:
    """A misspelt model waited for ever, with a line in a log."""
    async with AsyncClient(transport=SimFleet("1xH100")) as moorage:
        for submit in (moorage.submit, moorage.run):
            with pytest.raises(Rejected, match="no known worker could ever run"):
                await submit(["true"], "1xH10O")
        with pytest.raises(BatchRejected):
            await moorage.submit_many([["true"]], "1xH10O")
        with pytest.raises(Rejected):
            await moorage.submit({"run": {"argv": ["true"]}}, "1xH10O")
        assert (await moorage.submit(["true"], "1xH10O", on_no_match="wait")).accepted is not None
        own = {"run": {"argv": ["true"]}, "on_no_match": "wait"}
        assert (await moorage.submit(own, "1xH10O")).accepted is not None
        [_] = await moorage.submit_many([own], "1xH10O")
        assert (await moorage.submit(moorage.request(["true"], "1xH10O"))).accepted is not None
