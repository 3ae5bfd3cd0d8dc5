"""Functions of a service, called by an embedded worker: real NATS, a scripted leader, simulated devices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import msgspec
import nats
import nats.js.errors
import pytest
from nats.aio.msg import Msg

from moorage.bus.connection import State, connect
from moorage.bus.jetstream import JetStream
from moorage.bus.results import ResultStore
from moorage.bus.target import HOME_VARIABLE, UP_FILE, Up, started_ticks
from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.errors import Refused
from moorage.schemas.frames import End, Place, result_of
from moorage.schemas.handler import INLINE_BYTES_MAX, decode_result, result_bucket, result_object
from moorage.schemas.job import Request
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker import EmbeddedWorker, HandlerCancelled, HandlerContext, WorkerSettings
from moorage.worker.drivers.handler.driver import HandlerDriver
from tests.waiting import until


def body(*argv: str, gpu: Any = None, run: Any = None, **fields: Any) -> bytes:
    workload = {"driver": "handler", "argv": list(argv), "grace_s": 5} | (run or {})
    requires = {f"handler.{argv[0]}": ["1"]} if argv else {}
    return encode({"gpu": {} if gpu is None else gpu, "run": workload, "requires": requires, **fields})


def name_of(job: str = "a", fence: int = 10) -> AttemptName:
    return ("acme", job, 0, 1, fence)


def place(name: AttemptName, request: bytes, slots: tuple[int, ...] = (0,)) -> Place:
    return Place(*name, list(slots), "exclusive" if slots else "none", False, request)


class Service:
    """Handlers that a test steers from outside, in an embedded worker."""

    def __init__(self, url: str, prefix: str, state: Path, **fields: Any) -> None:
        self.overdue: list[HandlerContext] = []
        self.seen: list[HandlerContext] = []
        self.go_on = asyncio.Event()
        self.thread_goes_on = threading.Event()
        settings = WorkerSettings(state, "w1", prefix, simulate="2xH100", load_s=60, **fields)
        self.worker = EmbeddedWorker(url, settings, on_overdue=self.overdue.append)
        for handler in (
            self.give, self.give_in_thread, self.hang, self.hang_in_thread, self.ignore, self.fail, self.save,
            self.save_in_thread, self.give_hidden, self.hang_hidden, self.hang_and_hide,
            self.reports,
        ):  # fmt: skip
            self.worker.handler(handler.__name__)(handler)

    async def give(self, context: HandlerContext) -> object:
        self.seen.append(context)
        context.progress(0.5, "half way")
        words = context.arguments
        if words[:1] == ("bytes",):
            return bytes(int(words[1]))
        if words[:1] == ("no-result",):
            return object() if words[1:] else None
        return {"words": list(words), "seed": context.environment.get("SEED", "")}

    def give_in_thread(self, context: HandlerContext) -> str:
        self.seen.append(context)
        for step in range(200):
            context.progress(step / 200, f"step {step}")
        context.progress(1.0)
        return threading.current_thread().name

    async def reports(self, context: HandlerContext) -> str:
        context.report(step=1)
        context.report({"val/loss": 0.25}, step=2)
        await self.go_on.wait()
        self.go_on.clear()
        if context.arguments[0] == "fails":
            self.fail(context)
        return "ended"

    async def save(self, context: HandlerContext) -> str:
        assert not context.checkpoint_asked
        await context.until_checkpoint()
        assert context.checkpoint_asked
        return "saved"

    def save_in_thread(self, context: HandlerContext) -> str:
        while not context.wait_checkpoint(0.01):
            context.raise_if_cancelled()
        return "saved"

    async def hang(self, context: HandlerContext) -> None:
        self.seen.append(context)
        await self.go_on.wait()

    def hang_in_thread(self, context: HandlerContext) -> str:
        self.seen.append(context)
        while not context.wait_cancelled(0.01):
            if self.thread_goes_on.is_set():
                return "well"
        context.raise_if_cancelled()
        return "never"

    def give_hidden(self, context: HandlerContext) -> Awaitable[object]:
        """An async function behind a plain one, as decorators and lambdas make it."""
        return self.give(context)

    def hang_hidden(self, context: HandlerContext) -> Awaitable[None]:
        return self.hang(context)

    def hang_and_hide(self, context: HandlerContext) -> Awaitable[None]:
        """It is asked to stop in its thread, and returns an awaitable all the same."""
        self.seen.append(context)
        context.wait_cancelled(30)
        return self.hang(context)

    async def ignore(self, context: HandlerContext) -> str:
        """Trusted code that does not cooperate."""
        self.seen.append(context)
        while not self.go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.go_on.wait()
        return "late"

    def fail(self, context: HandlerContext) -> None:
        raise LookupError(f"no input {context.arguments[0]}")


@contextlib.asynccontextmanager
async def world(
    url: str, prefix: str, state: Path, *, numbers: dict[str, float] | None = None, **fields: Any
) -> AsyncIterator[tuple[ScriptedLeader, Service]]:
    async with ScriptedLeader(url, prefix, **(numbers or {})) as leader:
        service = Service(url, prefix, state, **fields)
        async with service.worker:
            await leader.joined("w1")
            yield leader, service
            service.go_on.set()
            service.thread_goes_on.set()
        with contextlib.suppress(nats.js.errors.NotFoundError):  # a bucket has its bound set aside while it is there
            await leader.nc.jetstream().delete_object_store(result_bucket(prefix, "acme"))


async def test_a_function_runs_with_its_lease_and_its_result_is_kept(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, service):
        seat = leader.seat("w1")
        hello = seat.joins[0].hello
        assert (hello.drivers, hello.labels["handler.give"]) == (["handler"], "1")
        await leader.want("w1", place(name_of(), body("give", "x", "y", run={"env": {"SEED": "7"}}), (1,)))
        assert (await leader.await_report("w1", "freed", name_of())).code == 0
        assert seat.kinds(name_of()) == ["claimed", "started", "exited", "freed"]
        exited = seat.report("exited", name_of())
        assert exited is not None
        assert exited.code == 0
        context = service.seen[0]
        device = service.worker.pool.slot_states()[1].slot
        assert (device, len(context.devices), context.attempt, context.fence) == (1, 1, 1, 10)
        assert context.environment["CUDA_VISIBLE_DEVICES"] == str(context.devices[0].index)
        assert context.environment["MOORAGE_GPU_UUIDS"] == context.uuids[0] == context.devices[0].uuid
        assert context.environment["MOORAGE_FENCE"] == "10"

        async with await connect(nats_url, "test") as connection:
            store = ResultStore(JetStream(connection), unique)
            kept = await store.get("acme", result_object("a", 0, 10), result_of(exited.detail))
        assert kept is not None
        assert decode_result(kept) == {"words": ["x", "y"], "seed": "7"}

        await until(lambda: '"result"' in leader.text(name_of()), what="the result's line")
        progress, result = (msgspec.json.decode(line) for line in leader.text(name_of()).splitlines())
        assert progress == {"progress": 0.5, "text": "half way"}
        assert result["value"] == {"words": ["x", "y"], "seed": "7"}
        assert (result["result"], result["content_type"]) == ("a.0.10", "application/json")


async def test_a_large_result_is_kept_whole_and_only_named_in_the_log(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    size = 300_000
    async with world(nats_url, unique, tmp_path) as (leader, _):
        await leader.want("w1", place(name_of(), body("give", "bytes", str(size))))
        await leader.await_report("w1", "freed", name_of())
        store = await nats.connect(nats_url)
        bucket = await store.jetstream().object_store(result_bucket(unique, "acme"))
        assert (await bucket.get("a.0.10")).data == bytes(size)
        await store.close()
        await until(lambda: '"result"' in leader.text(name_of()), what="the result's line")
        line = msgspec.json.decode(leader.text(name_of()).splitlines()[-1])
        assert (line["size_bytes"], "value" in line, size > INLINE_BYTES_MAX) == (size, False, True)


async def test_a_bucket_made_here_keeps_results_as_the_settings_say(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path, result_keep=120.0, result_bytes=2 << 20) as (leader, _):
        assert leader.seat("w1").joins[0].hello.keeps == {"result_s": 120.0, "result_bytes": 2 << 20}
        await leader.want("w1", place(name_of(), body("give")))
        await leader.await_report("w1", "freed", name_of())
        store = await nats.connect(nats_url)
        config = (await store.jetstream().stream_info(f"OBJ_{result_bucket(unique, 'acme')}")).config
        await store.close()
        assert (config.max_age, config.max_bytes) == (120, 2 << 20)


async def test_a_result_that_cannot_be_kept_fails_the_job(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, _):
        store = await nats.connect(nats_url)
        await store.jetstream().create_object_store(result_bucket(unique, "acme"), max_bytes=64 * 1024)
        await leader.want("w1", place(name_of(), body("give", "bytes", "300000")))
        exited = await leader.await_report("w1", "exited", name_of())
        assert exited.code == 1
        assert exited.detail.startswith("the result could not be kept: ")
        await leader.want("w1", place(name_of("b", 11), body("give", "bytes", "3000")))
        assert (
            await leader.await_report("w1", "exited", name_of("b", 11))
        ).code == 0  # the pieces of the first are gone
        await store.close()


async def test_a_plain_function_has_a_thread_and_its_progress_is_thinned_out(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, _):
        await leader.want("w1", place(name_of(), body("give_in_thread"), ()))
        await leader.await_report("w1", "freed", name_of())
        await until(lambda: '"result"' in leader.text(name_of()), what="the result's line")
        lines = [msgspec.json.decode(line) for line in leader.text(name_of()).splitlines()]
        assert lines[-1]["value"] == "handler a"
        assert lines[-2] == {"progress": 1.0}
        assert 2 <= len(lines) <= 20


async def test_what_a_function_reports_of_itself_is_told_while_it_runs_and_with_its_end(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, service):
        reported = {"step": 2, "val/loss": 0.25}
        for name, word in ((name_of(), "ends"), (name_of("b", 11), "fails")):
            await leader.want("w1", place(name, body("reports", word), ()))
            await until(
                lambda name=name: any(
                    each.job == name[1] and each.values == reported
                    for renewal in leader.seat("w1").renewals
                    for each in renewal.reported
                ),
                what="a renewal that tells it",
            )
            service.go_on.set()
            exited = await leader.await_report("w1", "exited", name)
            assert exited.code == (0 if word == "ends" else 1)
            assert (await leader.await_report("w1", "freed", name)).reported == reported
        await until(lambda: not leader.seat("w1").renewals[-1].reported, what="that ended ones are told no more")


async def test_what_fails_fails_with_its_word_and_its_traceback(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, _):
        requests = {
            "raises": body("fail", "in.mp4"),
            "no-json": body("give", "no-result", "object"),
            "user": body("give", run={"user": "nobody"}),
            "secret": body("give", run={"env": {"TOKEN": {"secret": "hf"}}}),
        }
        told = {}
        for job, request in requests.items():
            await leader.want("w1", place(name_of(job), request))
            if job != "secret":
                await leader.await_report("w1", "freed", name_of(job))
            report = await leader.await_report("w1", "refused" if job == "secret" else "exited", name_of(job))
            assert report is not None
            told[job] = (report.code, report.detail)
        assert told["raises"] == (1, "LookupError: no input in.mp4")
        assert told["no-json"][0] == 1
        assert "the result is neither bytes nor text nor JSON" in told["no-json"][1]
        assert told["user"] == (126, "start-failed: a function has no user")
        assert told["secret"][0] == 126
        assert told["secret"][1].startswith("not-here: secret 'hf': ")
        await until(lambda: "LookupError" in leader.text(name_of("raises"), "err"), what="the traceback")


async def test_a_function_s_caller_names_only_secrets_that_its_tenant_may(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir(mode=0o700)
    for name in ("acme-seed", "beta-seed"):
        (folder / name).write_text(f"planted-{name}")
        (folder / name).chmod(0o600)
    rules: dict[str, Any] = {"secrets_dir": folder, "secrets_for": {"acme": "acme-*"}}
    async with world(nats_url, unique, tmp_path / "state", **rules) as (leader, service):
        for job, secret in (("own", "acme-seed"), ("others", "beta-seed")):
            request = body("give", run={"env": {"SEED": {"secret": secret}}})
            await leader.want("w1", place(name_of(job), request))
            await leader.await_report("w1", "freed" if job == "own" else "refused", name_of(job))
        assert [context.environment["SEED"] for context in service.seen] == ["planted-acme-seed"]
        report = leader.seat("w1").report("refused", name_of("others"))
        assert report is not None
        assert report.code == 126
        assert report.detail.startswith("not-here: not-permitted: tenant acme may not have the secret beta-seed")


async def test_a_request_for_another_worker_s_function_is_refused(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, _):
        await leader.want("w1", place(name_of(), body("paint")), place(name_of("b"), body()))
        for job in ("a", "b"):
            refused = await leader.await_report("w1", "refused", name_of(job))
            assert refused.detail == "not-here: argv[0] names no handler of this worker"


async def test_an_awaitable_that_a_function_returns_is_awaited(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, _):
        await leader.want("w1", place(name_of(), body("give_hidden", "a", "b")))
        exited = await leader.await_report("w1", "exited", name_of())
        assert exited.code == 0, exited.detail
        await until(lambda: '"result"' in leader.text(name_of()), what="the result's line")
        assert msgspec.json.decode(leader.text(name_of()).splitlines()[-1])["value"]["words"] == ["a", "b"]


@pytest.mark.parametrize("kind", ["hang", "hang_in_thread", "hang_hidden", "hang_and_hide"])
async def test_a_cancelled_function_stops_and_frees_its_gpu(
    nats_url: str, unique: str, tmp_path: Path, kind: str
) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, service):
        await leader.want("w1", place(name_of(), body(kind)))
        await until(lambda: service.seen, what="the function runs")
        assert service.worker.pool.slot_states()[0].sharers == 1
        await leader.want("w1", End(*name_of(), "cancelled by ann"))
        exited = await leader.await_report("w1", "exited", name_of())
        assert (exited.code, exited.detail) == (-15, "end")
        await leader.await_report("w1", "freed", name_of())
        assert service.seen[0].cancel_reason == "cancelled by ann"
        assert service.worker.pool.slot_states()[0].sharers == 0
        assert not service.overdue


async def test_a_time_out_is_told_as_one(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, _):
        await leader.want("w1", place(name_of(), body("hang", run={"timeout_s": 0.05})))
        assert (await leader.await_report("w1", "exited", name_of())).detail == "timeout"


async def test_functions_are_asked_to_save_what_they_have_before_the_time_out(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, _):
        asked = {"checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 3599.8, "timeout_s": 3600}
        names = [name_of("in-loop", 10), name_of("in-thread", 11), name_of("not-asked", 12)]
        await leader.want(
            "w1",
            place(names[0], body("save", run=asked)),
            place(names[1], body("save_in_thread", run=asked), (1,)),
        )
        for name in names[:2]:
            exited = await leader.await_report("w1", "exited", name)
            assert (exited.code, exited.detail[:7]) == (0, "result:")
        await leader.want("w1", place(names[2], body("save_in_thread", run={"timeout_s": 0.2})))
        assert (await leader.await_report("w1", "exited", names[2])).detail == "timeout"


async def test_an_overdue_function_keeps_its_slot_in_quarantine_until_it_returns(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    """Promise table of handlers: ended by asking; overdue: quarantined, service told; freed when it returned."""
    async with world(nats_url, unique, tmp_path) as (leader, service):
        seat = leader.seat("w1")
        await leader.want("w1", place(name_of(), body("ignore", run={"grace_s": 0.05})))
        await leader.await_report("w1", "started", name_of())
        await leader.want("w1", End(*name_of(), "cancelled"))
        assert (await leader.await_report("w1", "quarantined", name_of())).detail == "0"
        assert [context.job for context in service.overdue] == ["a"]
        assert service.worker.pool.slot_states()[0].quarantine == "cannot be ended"
        assert "exited" not in seat.kinds(name_of())
        await leader.want("w1", place(name_of("b", 11), body("give")))
        assert (await leader.await_report("w1", "refused", name_of("b", 11))).detail == "quarantined 0"
        await until(lambda: "still running after its grace" in leader.text(name_of(), "err"), what="the word of it")

        service.go_on.set()
        exited = await leader.await_report("w1", "exited", name_of())
        assert (exited.code, exited.detail) == (0, "end")  # what it returned late is no result
        await leader.await_report("w1", "freed", name_of())
        assert not service.worker.pool.slot_states()[0].quarantine
        assert '"result"' not in leader.text(name_of())
        await leader.want("w1", place(name_of("c", 12), body("give", "no-result")))
        await leader.await_report("w1", "freed", name_of("c", 12))


@pytest.mark.slow
async def test_at_the_fence_a_function_is_asked_to_stop_and_sees_it_on_the_clock(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with world(nats_url, unique, tmp_path, numbers={"lease_s": 4.0, "grace_s": 0.5}) as (leader, service):
        seat = leader.seat("w1")
        await leader.want("w1", place(name_of(), body("hang_in_thread")))
        await until(lambda: service.seen, what="the function runs")
        leader.mute |= {"renew", "fact", "join"}
        await until(lambda: service.seen[0].cancelled, what="the fence")
        assert service.seen[0].cancel_reason == "fence"
        leader.mute.clear()
        await leader.joined("w1", joins=2)
        told = [(report.kind, report.detail) for report in seat.joins[-1].reports if report.kind in ("exited", "freed")]
        assert told == [("exited", "fence"), ("freed", "")]


async def test_the_service_s_own_claims_are_in_line_with_placements(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, service):
        pool = service.worker.pool
        await leader.want("w1", place(name_of(), body("hang"), (0, 1)))
        await until(lambda: service.seen, what="the function runs")
        waiting = asyncio.create_task(pool.claim())
        await until(lambda: pool.pending_claimers() == 1, what="a claim that waits")
        seat = leader.seat("w1")
        await until(lambda: seat.renewals[-1].waiting, what="a renewal that says so")
        await leader.want("w1", place(name_of("b", 11), body("give")))
        assert (await leader.await_report("w1", "refused", name_of("b", 11))).detail == "local-claimer-waits 0"
        service.go_on.set()
        lease = await waiting
        assert lease is not None
        await until(lambda: seat.renewals[-1].busy == [lease.slot], what="a renewal that tells the local claim")
        lease.release()


async def test_leaving_asks_all_to_stop_and_says_goodbye(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with world(nats_url, unique, tmp_path) as (leader, service):
        await leader.want("w1", place(name_of(), body("hang")))
        await until(lambda: service.seen, what="the function runs")
        assert [context.job for context in service.worker.running] == ["a"]
        await service.worker.close()
        assert leader.seat("w1").said_goodbye
        exited = await leader.await_report("w1", "exited", name_of())
        assert (exited.code, exited.detail) == (-15, "fence"), "nobody asked for it, so it is no failure of its own"


async def test_a_close_that_is_cancelled_lets_go_of_everything_all_the_same(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader:
        service = Service(nats_url, unique, tmp_path)
        await service.worker.open()
        await leader.joined("w1")
        await leader.want("w1", place(name_of(), body("ignore", run={"grace_s": 50})))
        await until(lambda: service.seen, what="the function runs")
        connection, closing = service.worker._connection, asyncio.create_task(service.worker.close())
        await until(lambda: service.seen[0].cancelled, what="it is asked to stop")
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert connection is not None
        assert connection.state is State.CLOSED
        service.go_on.set()


async def test_names_are_checked_and_known_before_the_worker_joins(nats_url: str, unique: str, tmp_path: Path) -> None:
    settings = WorkerSettings(tmp_path, "w1", unique, simulate="cpu")
    worker = EmbeddedWorker(nats_url, settings)
    with pytest.raises(Refused, match="no handler is registered"):
        await worker.open()
    with pytest.raises(Refused, match="not a name for a handler"):
        worker.handler("Trans Code")

    @worker.handler("echo")
    async def echo(context: HandlerContext) -> list[str]:
        return list(context.arguments)

    with pytest.raises(Refused, match="a name of its own"):
        worker.handler("echo")
    async with worker:
        assert await worker.pool.claim() is None  # no GPU here: the service falls back to the CPU
        with pytest.raises(Refused, match="before the worker is opened"):
            worker.handler("other")
    assert not worker.running


async def test_without_a_target_it_joins_the_moorage_up_of_this_folder_as_a_client_does(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NATS_CONTEXT", "NATS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    (tmp_path / UP_FILE).write_bytes(encode(Up(nats_url, os.getpid(), started_ticks(os.getpid()))))
    async with ScriptedLeader(nats_url, unique) as leader:
        worker = EmbeddedWorker(None, WorkerSettings(tmp_path / "state", "w1", unique, simulate="1xH100"))
        worker.handler("echo")(lambda context: None)
        async with worker:
            await leader.joined("w1")


@pytest.mark.slow
async def test_results_are_kept_by_the_jetstream_api_that_the_named_context_says(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    context = tmp_path / "nats" / "context" / "service.json"
    context.parent.mkdir(parents=True)
    context.write_bytes(encode({"url": nats_url, "jetstream_api_prefix": f"{unique}.js.API"}))
    asked: list[str] = []

    async def on_ask(message: Msg) -> None:
        asked.append(message.subject)
        await message.respond(b'{"error": {"code": 503, "err_code": 10039, "description": "not here"}}')

    async with ScriptedLeader(nats_url, unique) as leader:
        await leader.nc.subscribe(f"{unique}.js.API.>", cb=on_ask)
        worker = EmbeddedWorker("service", WorkerSettings(tmp_path / "state", "w1", unique, simulate="2xH100"))
        worker.handler("give")(lambda context: "a result")
        async with worker:
            await leader.joined("w1")
            await leader.want("w1", place(name_of(), body("give")))
            await until(lambda: asked, what="where the results go is asked there")
    assert asked[0] == f"{unique}.js.API.STREAM.INFO.OBJ_{result_bucket(unique, 'acme')}"


def test_a_context_checks_what_it_is_told() -> None:
    context = HandlerContext(
        name_of(),
        msgspec.json.decode(body("give", "x"), type=Request),
        (),
        "none",
        {},
        say_progress=lambda fraction, text: None,
        say_report=lambda line: None,
        fence_s=lambda: float("inf"),
    )
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"0\.\.1"):
            context.progress(wrong)
    for value in ([1], object(), float("nan"), "x" * 65):
        with pytest.raises(ValueError, match=r"numbers, true, false|not a number|finite|at most 64"):
            context.report(wrong=value)
    context.raise_if_cancelled()
    context.cancel("enough")
    with pytest.raises(HandlerCancelled, match="enough"):
        context.raise_if_cancelled()


async def test_more_functions_than_may_run_at_once_wait_and_do_not_fail(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of one frame, of which each is checked before any of them runs."""
    monkeypatch.setattr(HandlerDriver, "attempts_max", 2)
    async with world(nats_url, unique, tmp_path) as (leader, service):
        names = [name_of(f"j{at}", 10 + at) for at in range(4)]
        await leader.want("w1", *(place(name, body("hang"), ()) for name in names))
        for name in names[2:]:
            refused = await leader.await_report("w1", "refused", name)
            # the host's fault: it is tried again
            assert refused.detail == "the driver handler has 2 attempts, which is its limit"
        for name in names[:2]:
            await leader.await_report("w1", "started", name)
        service.go_on.set()
        for name in names[:2]:
            await leader.await_report("w1", "freed", name)
        again = name_of("j2", 20)
        await leader.want("w1", place(again, body("hang"), ()))
        assert (await leader.await_report("w1", "exited", again)).code == 0
