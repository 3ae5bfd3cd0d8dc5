"""`Client` is `AsyncClient` without await: compared signature by signature, and tried from threads and signals."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moorage.client import (
    Admin,
    AsyncAdmin,
    AsyncClient,
    AsyncFleet,
    AsyncForward,
    AsyncJob,
    AsyncLease,
    AsyncSchedules,
    AsyncService,
    AsyncWatch,
    BatchRejected,
    Client,
    ClientError,
    Fleet,
    Forward,
    Job,
    JobFailed,
    Lease,
    NotFound,
    Rejected,
    Schedules,
    Service,
    TimedOut,
    Watch,
)
from moorage.client.events import Event
from moorage.client.loop_thread import LoopThread
from moorage.testing import Ran, SimFleet, Task


def _public(kind: type) -> dict[str, inspect.Signature]:
    found = {}
    for name, member in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") or name == "__init__":
            found[name] = inspect.signature(member)
    return found


def _synced(annotation: object) -> str:
    """An async side's annotation as the sync side must have it."""
    text = re.sub(r"AsyncIterator\b", "Iterator", str(annotation))
    text = text.replace("Lending", "AsyncLease")
    return re.sub(r"\bAsync(Job|Watch|Lease|Service|Forward|Schedules|Fleet|Admin)\b", r"\1", text)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Client, AsyncClient),
        (Job, AsyncJob),
        (Watch, AsyncWatch),
        (Forward, AsyncForward),
        (Admin, AsyncAdmin),
        (Fleet, AsyncFleet),
        (Lease, AsyncLease),
        (Service, AsyncService),
        (Schedules, AsyncSchedules),
    ],
)
def test_the_twin_has_the_same_names_and_signatures(ours: type, theirs: type) -> None:
    sync, asynchronous = _public(ours), _public(theirs)
    expected = dict(asynchronous)
    if ours is not Client:  # handles are made by the client
        sync.pop("__init__")
        expected.pop("__init__")
    assert sorted(sync) == sorted(expected)
    for name, wanted in expected.items():
        found = sync[name]
        assert [
            (each.name, each.kind, each.default, str(each.annotation)) for each in found.parameters.values()
        ] == [
            (each.name, each.kind, each.default, _synced(each.annotation)) for each in wanted.parameters.values()
        ], name  # fmt: skip
        assert str(found.return_annotation) == _synced(wanted.return_annotation), name


def test_no_method_of_the_twin_is_awaited() -> None:
    for kind in (Client, Job, Watch, Forward, Admin, Fleet, Lease, Service, Schedules):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            assert not inspect.iscoroutinefunction(member), name
            assert not inspect.isasyncgenfunction(member), name


def _script(task: Task) -> Ran:
    word, *rest = task.argv
    return Ran(int(rest[0])) if word == "exit" else Ran(0, f"{word} on {task.env['MOORAGE_GPU_UUIDS']}\n")


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(transport=SimFleet("2x4xH100", script=_script), tenant="sync") as opened:
        yield opened


def test_client_run_returns_stdout_and_submit_follows_and_ends_jobs(client: Client) -> None:
    result = client.run(["train"], gpu="2xH100")
    assert result.stdout.startswith("train on SIM-")
    job = client.submit(["exit", "0"], gpu=1, job="one")
    states = [change.state for event in job.events("60s") for change in event.changes]
    assert states == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
    assert job.result().state == "SUCCEEDED"
    assert re.fullmatch(r"<Job one of sync SUCCEEDED 1xany on sim-\d+ accepted \d+m?s ago>", repr(job))
    with pytest.raises(JobFailed) as failed:
        client.submit(["exit", "7"]).result("60s")
    assert failed.value.exit_code == 7
    assert next(row.job for row in client.ls(states=["SUCCEEDED"]).jobs) == "one"
    assert {row.state for row in client.fleet.show().workers} == {"up"}
    assert client.fleet.drain("sim-0001").worker == "sim-0001"
    with pytest.raises(NotFound):
        client.job("nobody").show()
    with pytest.raises(Rejected):
        client.job("no.id")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.submit(["true"], time_limit="8h"),
        lambda client: client.plan(gpu="1xH100"),
        lambda client: client.job("no-such").show(),
    ],
)
def test_what_a_call_is_told_has_no_frame_below_it(client: Client, call: Callable[[Client], object]) -> None:
    """In a notebook the sentence stood behind thirty lines of frames."""
    with pytest.raises((TypeError, NotFound)) as told:
        call(client)
    assert [Path(frame.path).name for frame in told.traceback][-2:] == ["sync.py", "loop_thread.py"]


def test_many_are_waited_for_by_their_own_handles(client: Client) -> None:
    jobs = client.submit_many([["exit", str(code)] for code in (0, 3, 0)], gpu=1)
    assert {job.job for job in client.as_completed(jobs, "60s")} == {job.job for job in jobs}
    assert [result.code for result in client.wait(jobs)] == [0, 3, 0]
    with pytest.raises(BatchRejected) as refused:
        client.submit_many([{"job": "a", "run": {"argv": ["x"]}}, {"job": "a", "run": {"argv": ["y"]}}])
    assert [type(job) for job in refused.value.jobs] == [Job, type(None)]


def test_a_watch_hears_all_of_a_job_that_comes_later(client: Client) -> None:
    with client.watch("later", output=True) as watch:
        client.submit(["loud"], job="later")
        items = list(watch)
    assert [type(item) for item in items].count(Event) >= 1
    assert "".join(getattr(item, "text", "") for item in items).startswith("loud on")
    assert watch.state == "SUCCEEDED"


def test_an_iterator_that_is_left_early_lets_go_of_its_subscription(client: Client) -> None:
    job = client.submit(["hang"], driver="noop")
    for event in job.events("60s"):
        assert event.job == job.job
        break
    assert not client._twin._wire._histories.followers
    job.cancel("enough")


def test_a_wait_that_is_over_is_pythons_own_time_out_too(client: Client) -> None:
    """Who waits for futures as well catches both by one name."""
    with pytest.raises(TimeoutError) as late:
        client.submit(["hang"], driver="noop").result("50ms")
    assert type(late.value) is TimedOut
    assert late.value.why in str(late.value)


def test_several_threads_share_one_client(client: Client) -> None:
    codes: list[int | None] = []
    threads = [
        threading.Thread(target=lambda: codes.append(client.run(["exit", "0"], gpu=1, wait="60s").code))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 8


def test_it_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    client = Client(transport=SimFleet("1xH100"), name="a name to look for")
    with client:
        assert [each for each in threading.enumerate() if each.name == "a name to look for"]
        left = client.submit(["hang"], driver="noop").events()
        next(left)
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed while"):
        next(left)
    client.close()
    with client:  # and it opens again, on a fleet that is new
        assert client.ls().jobs == []
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="not open"):
        client.ls()


def test_a_client_that_cannot_connect_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(Exception, match="cannot reach"):
        Client("nats://127.0.0.1:1", connect_timeout="100ms").open()
    assert set(threading.enumerate()) <= before, "those of other tests may have ended meanwhile"


async def test_inside_a_loop_it_refuses_and_names_the_other() -> None:
    with pytest.raises(RuntimeError, match="AsyncClient"):
        Client()


def test_inside_a_loop_an_open_one_refuses_too(client: Client) -> None:
    async def inside() -> None:
        with pytest.raises(RuntimeError, match="AsyncClient"):
            client.ls()
        with pytest.raises(RuntimeError, match="AsyncClient"):
            next(client.events())

    asyncio.run(inside())
    assert client.ls().jobs == []


def test_an_interrupted_call_is_ended_in_the_loop_too() -> None:
    thread = LoopThread("interrupted")
    thread.start()
    ended: list[str] = []

    async def forever() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    try:
        with pytest.raises(KeyboardInterrupt):
            thread.call(forever())
        assert ended == ["ended"]
    finally:
        thread.stop()


class Alarm(Exception):
    """An exception that only the signal handler of a test raises."""


@pytest.mark.parametrize("kind", [TimeoutError, Alarm])
def test_an_exception_of_a_signal_handler_ends_the_call_and_its_coroutine(kind: type[Exception]) -> None:
    """The usual alarm of a script raises TimeoutError; the soft limits of task queues raise classes of their own."""
    thread = LoopThread("alarmed")
    thread.start()
    ended: list[str] = []
    raised = kind("half a second is over")

    def on_alarm(*_: object) -> None:
        raise raised

    async def forever() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with pytest.raises(kind) as got:
            thread.call(forever())
        assert got.value is raised
        assert ended == ["ended"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        thread.stop()


def test_an_alarm_ends_a_run_and_leaves_no_follower(client: Client) -> None:
    def on_alarm(*_: object) -> None:
        raise TimeoutError("the alarm")

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="the alarm"):
            client.run(["hang"], driver="noop", wait="30s")
        assert not client._twin._wire._histories.followers
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_after_a_fork_the_child_is_told(client: Client) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest here: only the word, and the end
        try:
            client.ls()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as told:
        assert b"before a fork" in told.read()


def test_a_forks_child_leaves_the_block_in_peace(client: Client) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            client.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.ls().jobs == []  # the parent's goes on


WITHOUT_DESCRIPTORS = """
import resource, threading
from moorage.client import Client
from moorage.testing import SimFleet
client = Client(transport=SimFleet("1xH100"))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
with open("/dev/null") as next_free:
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free.fileno() + 1, hard))
try:
    client.open()
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
with client:
    print(client.ls().jobs, threading.active_count())
"""


def test_without_a_descriptor_it_is_told_and_waits_for_nobody() -> None:
    words = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    out = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert out == "[Errno 24] Too many open files\n[] 2\n"


def test_what_is_handed_over_behind_the_loops_last_turn_is_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread("ends")
    thread.start()
    loop = thread._loop
    assert loop is not None
    hands_over, hand_over, close = threading.Event(), loop.call_soon_threadsafe, loop.close
    is_ending, is_handed_over = threading.Event(), threading.Event()

    def late(callback: Callable[..., object], *args: object) -> None:
        if threading.current_thread() is caller:
            hands_over.set()
            is_ending.wait(60)
        hand_over(callback, *args)
        if threading.current_thread() is caller:
            is_handed_over.set()

    def close_late() -> None:
        is_ending.set()
        is_handed_over.wait(60)
        close()

    def calls() -> None:
        try:
            thread.call(asyncio.sleep(0))
        except RuntimeError as error:
            told.append(str(error))

    told: list[str] = []
    caller = threading.Thread(target=calls, daemon=True)
    monkeypatch.setattr(loop, "call_soon_threadsafe", late)
    monkeypatch.setattr(loop, "close", close_late)
    caller.start()
    assert hands_over.wait(60)
    thread.stop()
    caller.join(20)
    assert told == ["the client was closed, or the call interrupted, before this was done"]


def test_nothing_of_a_client_goes_to_another_process_and_its_errors_do(client: Client) -> None:
    job = client.submit(["exit", "3"], gpu=1)
    for of_this_process in (client, job, job._twin):
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            pickle.dumps(of_this_process)
    errors: list[ClientError] = []
    for fails in (
        lambda: job.result("60s"),
        lambda: client.job("nobody").show(),
        lambda: client.submit(["x"], gpu="lots"),
        lambda: client.submit_many([{"job": "a", "run": {"argv": [word]}} for word in "xy"]),
        lambda: client.submit(["hang"], driver="noop").result(0),
    ):
        with pytest.raises(ClientError) as raised:
            fails()
        errors.append(raised.value)
    for error in errors:
        there = pickle.loads(pickle.dumps(error))
        assert type(there) is type(error)
        assert (str(there), there.problem, there.fixes) == (str(error), error.problem, error.fixes)
    failed, *_, batch, _ = [pickle.loads(pickle.dumps(error)) for error in errors]
    assert (failed.exit_code, failed.result.job) == (3, job.job)
    assert [type(each) for each in batch.jobs] == [str, type(None)]


def test_a_closed_client_fails_what_other_threads_wait_for() -> None:
    thread = LoopThread("closed")
    thread.start()
    waits, failed = threading.Event(), []

    async def forever() -> None:
        waits.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            thread.call(forever())
        except RuntimeError as error:
            failed.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert waits.wait(60)
    began = time.monotonic()
    thread.stop()
    waiting.join(60)
    assert not waiting.is_alive(), time.monotonic() - began
    assert "closed" in failed[0]
