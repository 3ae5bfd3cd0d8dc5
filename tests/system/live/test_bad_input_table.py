"""The same mistake over plain NATS, through the SDK and on the command line: one code, one exit code, one page."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import nats
import nats.errors
import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import NotAuthorized
from moorage.client.client import AsyncClient
from moorage.client.errors import JobFailed
from moorage.schemas.errors import MoorageError
from moorage.schemas.subjects import PREFIX_DEFAULT
from tests.system.cli.node import moorage
from tests.system.live.stack import ANSWER_S, Stack, caller, stack
from tests.turns import turns
from tests.waiting import until

TENANT: Final = "acme"
JOBS_MAX: Final = 200
QUICK: Final[dict[str, float]] = {"jobs_max": JOBS_MAX}
Job = dict[str, Any]


def job(**fields: Any) -> Job:
    """A request that waits for ever, with these fields in place of its own."""
    return {"gpu": {"model": "none such"}, "run": {"argv": ["true"]}, **fields}


@dataclass(frozen=True)
class Mistake:
    """One mistake in three forms: raw frame (a verb and its payload), command line (with its `stdin`), SDK call.

    None if a form cannot express it.
    """

    code: str
    exit_code: int
    raw: tuple[str, Any] | None
    sdk: Callable[[AsyncClient], Awaitable[Any]] | None
    line: list[str]
    stdin: Any = None
    says: str = ""
    env: dict[str, str] = field(default_factory=dict)


def submitted(code: str, exit_code: int, body: Any, says: str = "") -> Mistake:
    """One body, three ways."""
    return Mistake(code, exit_code, ("submit", body), lambda m: m.submit(body), ["submit", "-f", "-"], body, says)


BIG: Final = job(labels={"a": "x" * 70_000})
TWO_MIB: Final = job(labels={"a": "x" * 2_100_000})

MISTAKES: Final[dict[str, Mistake]] = {
    "a wrong type": submitted("invalid-argument", 2, job(priority="high"), "$.priority"),
    "a wrong type in a flag": Mistake(
        "invalid-argument", 2, ("submit", job(replicas="two")),
        lambda m: m.submit(["true"], replicas="two"),  # type: ignore[arg-type]
        ["submit", "--replicas", "two", "--", "true"], says="replicas",
    ),
    "a wrong unit": Mistake(
        "invalid-argument", 2, ("submit", job(deadline_s="10parsecs")),
        lambda m: m.submit(["true"], deadline_s="10parsecs"),  # type: ignore[arg-type]
        ["submit", "--deadline", "10parsecs", "--", "true"],
    ),
    "a wrong unit in a token": Mistake(
        "invalid-argument", 2, ("submit", job(gpu="2xH100:80X")),
        lambda m: m.submit(["true"], gpu="2xH100:80X"),
        ["submit", "--gpu", "2xH100:80X", "--", "true"], says="gpu",
    ),
    "no GPU at all": submitted("invalid-argument", 2, job(gpu={"count": 0}), "$.gpu.count"),
    "an unknown field": submitted("invalid-argument", 2, job(prioritie=7), "the nearest field is priority"),
    "an unknown verb": Mistake(
        "unknown-verb", 2, ("sbmit", {}), lambda m: m._wire.read("sbmit", {}), ["sbmit"], says="submit"
    ),
    "a verb of other tools": Mistake(
        "unknown-verb", 2, ("kill", {}), lambda m: m._wire.read("kill", {}), ["kill"], says="cancel"
    ),
    "a bad job id": submitted("invalid-argument", 2, job(job="a.b"), "$.job"),
    "a bad tenant": Mistake(
        "invalid-argument", 2, None, lambda m: _other_tenant(m, "No_Body"), ["ls", "--tenant", "No_Body"],
        says="no-body",
    ),
    "a state that is none": Mistake(
        "invalid-argument",
        2,
        ("ls", {"states": ["ASLEEP"]}),
        lambda m: m.ls(states=["ASLEEP"]),
        ["ls", "--state", "asleep"],
        says="RUNNING",
    ),
    "a limit that is none": Mistake(
        "invalid-argument", 2, ("ls", {"limit": 0}), lambda m: m.ls(limit=0), ["ls", "--limit", "0"], says="1..1000"
    ),
    "a field that a question does not have": Mistake(
        "invalid-argument", 2, ("usage", {"from_ms": 1}),
        lambda m: m._wire.read("usage", {"from_ms": 1}), [], says="since_s",
    ),
    "a field that a cancel does not have": Mistake(  # else it would cancel the whole job
        "invalid-argument", 2, ("cancel", {"job": "a", "replica": 3}),
        lambda m: m._wire.read("cancel", {"job": "a", "replica": 3}), [], says="replica",
    ),
    "a field that an operator's question does not have": Mistake(
        "invalid-argument", 2, ("admin.fleet", {"wroker": "a"}),
        lambda m: m._wire.operate("fleet", {"wroker": "a"}), [], says="worker",
    ),
    "no JSON": Mistake(
        "invalid-argument", 2, ("submit", b"{"), None, ["submit", "-f", "-"], b"{"
    ),
    "an empty batch": Mistake("invalid-argument", 2, ("submit", []), None, ["submit", "-f", "-"], []),
    "a batch too large": Mistake(  # the SDK and the command send several frames instead: see below
        "invalid-argument", 2, ("submit", [{}] * 10_001), None, [], says="1..10000"
    ),
    "a request too big": submitted("too-large", 2, BIG, "65536"),
    "a request bigger than NATS takes": Mistake(  # over plain NATS the server ends the connection
        "too-large", 2, None, lambda m: m.submit(TWO_MIB), ["submit", "-f", "-"], TWO_MIB, "65536"
    ),
    "nobody by that id": Mistake(
        "not-found", 3, ("show", {"job": "nobody"}), lambda m: m.job("nobody").show(), ["show", "nobody"],
        says="moorage ls",
    ),
    "no worker of that name": Mistake(
        "not-found", 3, ("admin.drain", {"worker": "sim-000O"}),
        lambda m: m.fleet.drain("sim-000O"), ["drain", "sim-000O"],
        says="sim-0000 has",
    ),
    "an unknown model": submitted(
        "failed-precondition", 1, job(gpu={"model": "H10O"}, on_no_match="reject"), "the fleet has NVIDIA H100"
    ),
}  # fmt: skip


async def _other_tenant(client: AsyncClient, tenant: str) -> None:
    AsyncClient(client._wire.context, tenant=tenant)


class Table:
    """One stack on the subjects that the command speaks, for all of these tests."""

    def __init__(self, server: EmbeddedServer, made: Stack) -> None:
        self.server = server
        self.made = made

    async def ask(self, verb: str, payload: Any) -> Any:
        """Over plain NATS."""
        async with caller(self.made, TENANT) as one:
            where = verb.split(".")
            subject = one.subjects.admin(where[1]) if where[0] == "admin" else one.subjects.api(TENANT, verb)
            data = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
            return msgspec.json.decode((await one.nc.request(subject, data, timeout=ANSWER_S)).data)

    def client(self, **more: Any) -> AsyncClient:
        return AsyncClient(self.server.url, **{"tenant": TENANT, "timeout": ANSWER_S, **more})


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    loop = asyncio.new_event_loop()
    exits = contextlib.AsyncExitStack()

    async def enter() -> Table:
        server = await EmbeddedServer.start(tmp_path_factory.mktemp("nats"))
        exits.push_async_callback(server.stop)
        made = await exits.enter_async_context(stack(server, PREFIX_DEFAULT))
        await made.scheduler(config=QUICK)
        await made.agent("worker", "1x8xH100")
        async with caller(made, TENANT) as one:
            await one.leader()
            await one.workers_up("sim-0000")
        return Table(server, made)

    yield loop.run_until_complete(enter())
    loop.run_until_complete(exits.aclose())
    loop.close()


async def line(table: Table, argv: list[str], stdin: Any = None, **env: str) -> tuple[int, Any, str]:
    """The exit code, the problem that --json prints, and what a person reads."""
    text = stdin.decode() if isinstance(stdin, bytes) else "" if stdin is None else msgspec.json.encode(stdin).decode()
    where = {"NATS_URL": table.server.url, "MOORAGE_TENANT": TENANT, "COLUMNS": "200", **env}
    told, json = await asyncio.gather(
        moorage(*argv, env=where, stdin=text), moorage(*_with_json(argv), env=where, stdin=text)
    )
    assert told.code == json.code
    assert "Traceback" not in told.err
    frames = [frame for frame in json.frames if frame["kind"] == "error"] if json.out else []
    return told.code, frames[-1] if frames else None, told.err


def _with_json(argv: list[str]) -> list[str]:
    at = argv.index("--") if "--" in argv else len(argv)
    return [*argv[:at], "--json", *argv[at:]]


async def page_of(code: str) -> dict[str, str]:
    return {row[0]: row[1] for row in (await moorage("errors", code)).rows}


def check(problem: Any, code: str) -> None:
    """A problem has all that somebody needs who sees nothing else."""
    assert problem["code"] == code, problem
    assert problem["message"]
    assert problem["fault"] in ("caller", "fleet")


def check_talk(err: str, code: str) -> None:
    first, *rest = err.splitlines()
    assert first.startswith(f"error[{code}]: "), err
    assert any(row.startswith("fix: ") for row in rest), err
    assert rest[-1] == f"more: moorage errors {code}"


@pytest.mark.parametrize("name", turns(list(MISTAKES), often=3))
async def test_one_mistake_is_one_code_in_all_three(table: Table, name: str) -> None:
    mistake = MISTAKES[name]
    said = ""
    if mistake.raw is not None:
        answer = await table.ask(*mistake.raw)
        assert answer["kind"] == "error"
        check(answer, mistake.code)
        said += str(answer)
        assert mistake.says in said or mistake.line == ["sbmit"], said
    if mistake.sdk is not None:
        async with table.client() as client:
            with pytest.raises(MoorageError) as raised:
                await mistake.sdk(client)
        check(msgspec.to_builtins(raised.value.problem), mistake.code)
        said += str(raised.value.problem)
        assert mistake.says in str(raised.value.problem) or mistake.line == ["sbmit"]
    if mistake.line:
        exit_code, problem, err = await line(table, mistake.line, mistake.stdin, **mistake.env)
        assert exit_code == mistake.exit_code, err
        check_talk(err, mistake.code)
        assert mistake.says in err, err
        if problem is not None:
            check(problem, mistake.code)
    page = await page_of(mistake.code)
    assert page["exit code"] == str(mistake.exit_code)
    assert page["fix"]


async def test_other_content_under_a_known_id(table: Table, unique: str) -> None:
    assert (await table.ask("submit", job(job=unique)))["kind"] == "accepted"
    other = job(job=unique, priority=7)
    check(await table.ask("submit", other), "conflict")
    async with table.client() as client:
        with pytest.raises(MoorageError) as raised:
            await client.submit(other)
    check(msgspec.to_builtins(raised.value.problem), "conflict")
    exit_code, problem, err = await line(table, ["submit", "-f", "-"], other)
    assert exit_code == 1
    check(problem, "conflict")
    check_talk(err, "conflict")
    assert (await table.ask("show", {"job": unique}))["data"]["priority"] == 50  # the first one stands
    await table.ask("cancel", {"job": unique})


@pytest.mark.slow
async def test_a_full_queue(table: Table, unique: str) -> None:
    answers = await table.ask("submit", [job(job=f"{unique}-{at}") for at in range(JOBS_MAX + 1)])
    taken = [answer["job"] for answer in answers if answer["kind"] == "accepted"]
    try:
        check(answers[-1], "queue-full")
        assert answers[-1]["retry_after_s"] > 0
        check(await table.ask("submit", job()), "queue-full")
        async with table.client() as client:
            with pytest.raises(MoorageError) as raised:
                await client.submit(job())
        check(msgspec.to_builtins(raised.value.problem), "queue-full")
        exit_code, problem, err = await line(table, ["submit", "-f", "-"], job())
        assert exit_code == 1
        check(problem, "queue-full")
        check_talk(err, "queue-full")
        assert "again in 1 s" in err
    finally:
        for name in taken:
            await table.ask("cancel", {"job": name})
    assert (await table.ask("submit", job(job=f"{unique}-after")))["kind"] == "accepted"
    await table.ask("cancel", {"job": f"{unique}-after"})


@pytest.mark.slow
async def test_a_schedule_that_cannot_be_met_is_accepted_and_expires(table: Table, unique: str) -> None:
    """Whatever an estimate says, it waits, and is EXPIRED when the time is over."""
    late = job(start_within_s=0.3)
    assert (await table.ask("submit", {**late, "job": f"{unique}-raw"}))["kind"] == "accepted"
    async with caller(table.made, TENANT) as one:
        shown = await one.reaches(f"{unique}-raw", "EXPIRED")
    assert "start" in shown["why"]
    async with table.client() as client:
        accepted = await client.submit({**late, "on_no_match": "wait"})
        with pytest.raises(JobFailed) as raised:
            await accepted.result(ANSWER_S)
    assert (raised.value.code, raised.value.state) == ("job-expired", "EXPIRED")
    words = ["run", "--gpu", "1xZ9000", "--on-no-match", "wait", "--start-within", "300ms", "--", "true"]
    exit_code, _, err = await line(table, words)
    assert exit_code == 1
    assert "error[job-expired]: " in err
    page = await page_of("job-expired")
    assert page["exit code"].endswith("or 1 without either")
    assert "EXPIRED" in page["note"]


@pytest.mark.slow
async def test_a_wait_that_is_over_before_the_job(table: Table, unique: str) -> None:
    assert (await table.ask("submit", job(job=unique)))["kind"] == "accepted"
    async with table.client() as client:
        with pytest.raises(MoorageError) as raised:
            await client.job(unique).result(0.2)
    check(msgspec.to_builtins(raised.value.problem), "timed-out")
    exit_code, problem, err = await line(table, ["wait", unique, "--at-most", "200ms"])
    assert exit_code == 6
    check(problem, "timed-out")
    check_talk(err, "timed-out")
    assert (await page_of("timed-out"))["exit code"] == "6"
    assert (await table.ask("show", {"job": unique}))["data"]["state"] == "QUEUED"
    await table.ask("cancel", {"job": unique})


async def test_nobody_leads(nats_url: str, unique: str) -> None:
    """Over plain NATS it is the server's own 503; the SDK and the command ask again for as long as they may."""
    nc = await nats.connect(nats_url)
    with pytest.raises(nats.errors.NoRespondersError):
        await nc.request(f"moorage.api.{unique}.submit", b"{}", timeout=ANSWER_S)
    await nc.close()
    async with AsyncClient(nats_url, tenant=unique, timeout=2) as client:
        with pytest.raises(MoorageError) as raised:
            await client.submit(["true"])
    check(msgspec.to_builtins(raised.value.problem), "no-scheduler")
    ran = await moorage("ls", "--timeout", "2s", env={"NATS_URL": nats_url, "MOORAGE_TENANT": unique})
    assert ran.code == 5
    check_talk(ran.err.partition("\n")[2], "no-scheduler")  # the first line says that it asks again
    assert (await page_of("no-scheduler"))["exit code"] == "5"


@pytest.mark.slow
async def test_denied_by_nats(tmp_path: Path) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats")
    try:
        config = tmp_path / "nats" / "nats.conf"
        user = '{ user: guest, password: p, permissions: { publish: "nothing", subscribe: "_INBOX.>" } }'
        config.write_text(
            config.read_text().replace("users: [ { user: moorage", f"users: [ {user}, {{ user: moorage", 1)
        )
        os.kill(server.pid, signal.SIGHUP)
        url = server.url.replace("nats://", "nats://guest:p@")
        errors: list[str] = []

        async def reloaded() -> bool:  # by our own connection: nats-py leaves the socket of a refused one open
            with contextlib.suppress(NotAuthorized):
                await (await connect(url, "guest")).close()
                return True
            return False

        await until(reloaded, ANSWER_S, "the guest may come in")
        nc = await nats.connect(url, allow_reconnect=False, error_cb=_keep(errors))
        await nc.publish("moorage.api.acme.ls", b"{}")
        await until(lambda: any("permissions violation" in error.lower() for error in errors), what="refused")
        await nc.close()
        async with AsyncClient(url, tenant=TENANT, timeout=ANSWER_S) as client:
            with pytest.raises(MoorageError) as raised:
                await client.ls()
        check(msgspec.to_builtins(raised.value.problem), "permission-refused")
        ran = await moorage("ls", env={"NATS_URL": url})
        assert ran.code == 4
        check_talk(ran.err, "permission-refused")
        assert (await page_of("permission-refused"))["exit code"] == "4"

        wrong = url.replace(":p@", ":hunter2@")
        ran = await moorage("ls", env={"NATS_URL": wrong})
        assert ran.code == 4
        check_talk(ran.err, "not-authorized")
        assert "hunter2" not in ran.err
        assert (await page_of("not-authorized"))["exit code"] == "4"
    finally:
        await server.stop()


def _keep(errors: list[str]) -> Callable[[Exception], Awaitable[None]]:
    async def keep(error: Exception) -> None:
        errors.append(str(error))

    return keep


async def test_many_are_sent_in_as_many_frames_as_it_takes(table: Table, unique: str) -> None:
    """A batch that is too large for one frame is no mistake of whoever has the SDK or the command."""
    body = {"run": {"driver": "noop", "argv": ["exit", "0"]}, "labels": {"a": "x" * 60_000}, "on_no_match": "wait"}
    many = [{**body, "job": f"{unique}-{at}"} for at in range(20)]  # each counts 8
    assert len(msgspec.json.encode(many)) > 1024 * 1024
    async with table.client() as client:
        jobs = await client.submit_many(many)
    assert [one.job for one in jobs] == [one["job"] for one in many]
    ran = await moorage(
        "submit", "-f", "-", env={"NATS_URL": table.server.url, "MOORAGE_TENANT": TENANT},
        stdin=msgspec.json.encode(many).decode(),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.out.split() == [one["job"] for one in many]
