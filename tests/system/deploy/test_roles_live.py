"""Everybody with their own key: a whole stack under the permissions of a site, and answers that somebody bends."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.connection import Connection
from moorage.bus.contexts import Context
from moorage.bus.errors import PermissionRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.transport import Delivery
from moorage.cli.doctor.checks import all_checks
from moorage.cli.fleet.nats_config import ACCOUNTS, RELOADS, write
from moorage.cli.framework.options import Options
from moorage.client import AsyncClient, NotFound, NotPermitted, Rejected
from moorage.client.view.checks import Check
from moorage.schemas.roles import OPERATOR_READS, RIGHTS_ANEW
from moorage.schemas.subjects import API_VERBS, Subjects
from moorage.worker.supervisor.client import Supervised, SupervisorError
from moorage.worker.supervisor.protocol import SOCKET_NAME
from tests.servers import stream_is_there
from tests.sites import RunningSite, running, settled
from tests.system.cli import forks
from tests.system.cli.node import moorage
from tests.system.cli.pages import served
from tests.system.live.stack import ANSWER_S, RealProcess, request
from tests.waiting import until

SUBJECTS: Final = Subjects()
#: what a site may look like, by name
SITES: Final[dict[str, dict[str, Any]]] = {
    "nkey-account-per-tenant": {},
    "nkey-shared-account": {"shared": True},
    "env-account-per-tenant": {"auth": "env"},
    "mtls-cluster": {"auth": "mtls", "servers": 3},
    "nkey-cluster-shared": {"servers": 3, "shared": True, "tls": "only"},
}


class Everybody:
    """A scheduler and a worker of two simulated GPUs as processes of the command, each with its own key."""

    def __init__(self, site: RunningSite, folder: Path, secrets: dict[str, str]) -> None:
        self.site = site
        self.folder = folder
        self.processes: list[RealProcess] = []
        for name, value in secrets.items():
            (folder / "secrets").mkdir(mode=0o700, exist_ok=True)
            (folder / "secrets" / name).write_text(value)
            (folder / "secrets" / name).chmod(0o600)

    async def start(self) -> None:
        await self._scheduler()
        await self._worker()

    async def restart(self, which: str) -> None:
        """Kill the scheduler or the worker's agent, and start another."""
        [process] = [each for each in self.processes if each.log.name == f"{which}.log"]
        await process.kill()
        self.processes.remove(process)
        await (self._scheduler() if which == "scheduler" else self._worker())

    async def _scheduler(self) -> None:
        replicas = str(len(self.site.site.servers))
        await self._spawn(
            "scheduler", "--nats", "scheduler.main", "--replicas", replicas, MOORAGE_LEDGER_URL="ledger.main"
        )

    async def _worker(self) -> None:
        state = str(self.folder / "w1")
        more = ("--secrets", str(self.folder / "secrets")) if (self.folder / "secrets").exists() else ()
        await self._spawn(
            "worker", "--nats", "worker.w1", "--id", "w1", "--simulate", "1x2xT4", "--state", state, *more
        )

    async def _spawn(self, *words: str, **variables: str) -> None:
        log = self.folder / f"{words[0]}.log"
        environment = {**os.environ, **self.site.environment, **variables}
        with log.open("ab") as out:
            process = await forks.python("-m", "moorage.cli", *words, env=environment, out=out, cwd=self.folder)
        self.processes.append(RealProcess(process, log))

    def client(self, key: str, tenant: str = "acme") -> AsyncClient:
        return AsyncClient(self.site.context(key), tenant=tenant, timeout=ANSWER_S)

    def words(self) -> str:
        return "\n".join(f"--- {each.log.name}\n{each.words()[-4000:]}" for each in self.processes)

    async def end(self) -> None:
        state = self.folder / "w1" / "supervisor"
        for each in self.processes:
            if each.log.name == "worker.log":  # killed now, it could have begun a supervisor that outlives the test
                await until(partial(_has_begun, each, state))
            await each.kill()
        with contextlib.suppress(SupervisorError, OSError):
            supervised = await Supervised.connect(state, spawn_if_absent=False)
            await supervised.shutdown(0.0)


def _has_begun(worker: RealProcess, state: Path) -> bool:
    """Whether its supervisor answers, or it never will."""
    return worker.process.returncode is not None or (state / SOCKET_NAME).exists()


@contextlib.asynccontextmanager
async def everybody(
    *, secrets: dict[str, str] | None = None, calls: bool = False, **settings: Any
) -> AsyncIterator[Everybody]:
    """With `calls`, the worker has the keys of the tenants' services as `nats-config` wrote them."""
    with tempfile.TemporaryDirectory(prefix="moorage-roles-") as folder:
        async with running(**settings) as site:
            made = Everybody(site, Path(folder), secrets or {})
            if calls:
                shutil.copytree(site.folder / "secrets", Path(folder) / "secrets", dirs_exist_ok=True)
            try:
                await made.start()
                yield made
            except BaseException:
                print(made.words())
                raise
            finally:
                await made.end()


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
async def test_a_job_runs_and_everybody_does_what_they_may(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SITES[site]
    queue = settings.get("servers", 1) == 1 and not settings.get("shared")
    async with (
        everybody(**settings) as made,
        made.client("submitter.acme") as acme,
        made.client("operator.ana") as ana,
        contextlib.AsyncExitStack() as open_ones,
    ):
        fleet: list[Delivery] = []
        observer = await open_ones.enter_async_context(await made.site.connect("observer.graf"))
        connection = await open_ones.enter_async_context(await made.site.connect("submitter.acme"))
        await observer.subscribe(SUBJECTS.fleet_frame, fleet.append)
        job = await acme.submit(["sh", "-c", "echo said by $MOORAGE_TENANT"], job="train-1", gpu="1xT4")
        lines: list[object] = []
        async for chunk in job.logs():
            lines.append(chunk)
        assert (await job.result()).state == "SUCCEEDED"
        assert "said by acme" in str(lines)
        # an operator reads, holds and releases what a tenant has
        waiting = await acme.submit(["true"], job="big", gpu="2xT4", replicas=1, priority=1)
        await waiting.result()
        held = await acme.submit(["true"], job="held", gpu="1xMI250", on_no_match="wait")
        monkeypatch.setenv("LOGNAME", "mallory")  # what a client says of itself
        hold = (await ana.admin.hold(held.job, why="test")).hold
        assert hold is not None
        assert (hold.by, hold.said) == ("operator:ana", "mallory")
        assert (await ana.job(held.job).show()).state == "QUEUED"
        assert [row.tenant for row in await ana.admin.tenants()] == ["acme"]
        assert (await ana.fleet.show()).workers[0].worker == "w1"
        assert (await ana.plan(drain=["w1"])).starts == "none"
        # and may not hand in, nor may a tenant be operator or another tenant
        with pytest.raises(NotPermitted):
            await ana.submit(["true"], job="not-mine")
        for asked in (acme.fleet.show(), acme.admin.drop(1), acme.admin.hold("held"), acme.fleet.audit()):
            with pytest.raises(NotPermitted):
                await asked
        async with made.client("submitter.acme", "beta") as spy:
            with pytest.raises(NotPermitted):
                await spy.ls()
        await until(lambda: fleet, ANSWER_S, "a frame of the fleet at the observer")
        if queue:
            answer = await connection.request(SUBJECTS.request("acme", "submit"), encoded("from-the-queue"), ANSWER_S)
            assert b'"seq"' in answer.data

            async def is_read() -> bool:
                return "from-the-queue" in [row.job for row in (await acme.ls()).jobs]

            await until(is_read, ANSWER_S, "the queued request")
            assert (await acme.job("from-the-queue").result()).state == "SUCCEEDED"
        else:
            with pytest.raises(Exception, match="may not"):
                await connection.request(SUBJECTS.request("acme", "submit"), encoded("from-the-queue"), ANSWER_S)
        logged = made.words().lower()
        assert "may not" not in logged, made.words()
        assert "permission" not in logged, made.words()


@pytest.mark.slow
async def test_top_shows_each_key_what_it_may_see() -> None:
    async with everybody() as made, made.client("submitter.acme") as acme:
        await (await acme.submit(["true"], job="first", gpu="1xT4")).result()
        await acme.submit(["sleep", "600"], job="runs", gpu="2xT4")
        await acme.submit(["true"], job="waits", gpu="2xT4")

        async def seen(key: str) -> dict[str, Any]:
            ran = await moorage("top", "--json", "--nats", key, "--tenant", "acme", env=made.site.environment)
            assert ran.code == 0, ran.err
            return ran.frame

        async def is_explained() -> bool:
            rows = (await seen("operator.ana"))["waiting"]
            return [(row["tenant"], row["job"], row.get("reason")) for row in rows] == [("acme", "waits", "busy")]

        await until(is_explained, ANSWER_S, "the operator sees who waits and why")
        ana = await seen("operator.ana")
        assert (ana["unseen"], ana["fits"][0]["gpus"], ana["leader"] != "") == ([], 2, True)
        tenant = await seen("submitter.acme")
        assert [row["job"] for row in tenant["waiting"]] == ["waits"]
        assert not tenant["sees_fleet"]
        assert tenant["unseen"] == ["the fleet, and jobs of other tenants than acme: that takes an operator's key"]
        ran = await moorage("top", "--once", "--nats", "submitter.acme", "--tenant", "acme", env=made.site.environment)
        assert "wrong: not shown to this key" in ran.out
        assert "nothing is wrong" not in ran.out
        observer = await seen("observer.graf")
        assert (observer["waiting"], observer["jobs"], observer["counts"]["leased"]) == ([], [], 2)
        assert observer["idle"][0]["worker"] == "w1", "the loads tell which worker's GPUs are leased and unused"
        assert observer["unseen"] == [
            "jobs, and why they wait: that takes an operator's key, or a tenant's",
            "what is wrong with schedulers, the durable queue and the history: that takes an operator's key",
        ]


@pytest.mark.slow
async def test_a_damaged_key_and_that_of_another_user_are_one_line() -> None:
    async with running() as site:
        key = Path(site.context("operator.ana").nkey)
        other = Path(site.context("submitter.acme").nkey).read_bytes()
        for text, told, fix in (
            (b"SUAGARBAGE", f"nkey {key} is damaged: it holds no seed of a user", "copy the key again"),
            (other, "this NATS user may not subscribe to _inbox.", f"{key} is not the key of operator.ana"),
        ):
            key.write_bytes(text)
            ran = await moorage("ls", "--nats", "operator.ana", env=site.environment)
            lines = ran.err.splitlines()
            assert ran.code != 0
            assert told in lines[0], ran.err
            assert fix in lines[1], ran.err
            rows = (await moorage("doctor", "--json", "--nats", "operator.ana", env=site.environment)).frames
            [row] = [row for row in rows if row["name"] == "nats"]
            assert (row["verdict"], told in row["found"], fix in row["fix"]) == ("fail", True, True), row


async def test_a_key_with_the_rights_of_an_earlier_release_is_told_to_be_given_new_ones() -> None:
    async with running() as site:
        accounts = site.folder / ACCOUNTS
        text = accounts.read_text()
        for right in ("moorage.admin.ana.*", "moorage.events.acme"):  # as if they had come with this release
            assert right in text
            text = text.replace(right, "moorage.of-before")
        accounts.write_text(text)
        await site.reload()
        ran = await moorage("fleet", "--nats", "operator.ana", env=site.environment)
        assert "fix: these rights are of an earlier release" in ran.err, ran.err
        rows = (await moorage("doctor", "--json", "--nats", "submitter.acme", env=site.environment)).frames
        [row] = [row for row in rows if row["name"] == "events"]
        assert (row["verdict"], row["fix"]) == ("warn", RIGHTS_ANEW)
        ran = await moorage("call", "echo", "x", "--nats", "operator.ana", "--tenant", "acme", env=site.environment)
        assert "earlier release" not in ran.err, "its role never had that right"


@pytest.mark.slow
async def test_a_call_that_a_key_may_not_make_is_refused_at_once() -> None:
    async with running() as site:
        for name in ("echo", "echo.words"):
            words = ("call", name, "x", "--within", "60s", "--nats", "operator.ana", "--tenant", "acme")
            ran = await moorage(*words, env=site.environment)
            assert f"may not publish to moorage.call.acme.{name}" in ran.err, ran.err


@pytest.mark.slow
async def test_the_page_shows_each_key_what_it_may_see() -> None:
    job = "/job/acme/speaks"
    refused = "<pre>output is the tenant&#39;s</pre>"
    async with everybody() as made, made.client("submitter.acme") as acme:
        await acme.submit(["sh", "-c", "echo said aloud; sleep 600"], job="speaks", gpu="2xT4")

        async def pages(*words: str) -> dict[str, str]:
            async with served(*words, env=dict(made.site.environment)) as page:
                given = {"Cookie": await page.entered()} if page.key else {}
                paths = ("/", "/queue", job, "/lanes", "/usage", "/worker/w1")

                async def is_said() -> dict[str, str] | None:
                    found = {path: (await page.get(path, **given)).text for path in paths}
                    words = ("takes an operator", "aloud</pre>", refused)
                    return found if any(word in found[job] for word in words) else None

                found: dict[str, str] = await until(is_said, ANSWER_S, "the job's page has its output, or why not")
                closed = (await page.get("/")).status == 403
            assert closed == bool(given), "what an observer may see is open, the rest is behind the link"
            return found

        observer = await pages("--nats", "observer.graf")
        assert 'data-worker="w1"' in observer["/"]
        assert "simulated" in observer["/"]
        shown = [text.partition("<body>")[2] for text in observer.values()]
        assert not any(word in text for text in shown for word in ("acme", "speaks", "aloud"))
        for path in ("/queue", job, "/lanes", "/usage"):
            assert "takes an operator&#39;s key" in observer[path], observer[path]
        ana = await pages("--nats", "operator.ana")
        assert "acme/speaks" in ana["/queue"]
        assert "acme/speaks" in ana["/worker/w1"]
        assert "/job/acme/speaks" in ana["/lanes"]
        assert (refused in ana[job], "aloud</pre>" in ana[job]) == (True, False)
        beside = await pages("--nats", "operator.ana", "--output-of", "acme=submitter.acme")
        assert "said aloud</pre>" in beside[job], beside[job]
        tenant = await pages("--nats", "submitter.acme", "--tenant", "acme")
        assert "said aloud</pre>" in tenant[job]
        assert "acme/speaks" in tenant["/queue"]
        assert "who had which GPU is not shown" in tenant["/lanes"]
        logged = made.words().lower()
        assert "permission" not in logged, made.words()


def encoded(job: str, **fields: Any) -> bytes:
    return msgspec.json.encode(request(job, **fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, {"submitter.acme": ("ok", "stores requests even while no scheduler runs")}),
        ({"shared": True}, {"submitter.acme": ("ok", "an account for each tenant")}),
        (
            {"servers": 3, "shared": True},
            {
                "submitter.acme": ("ok", "that is right in a cluster"),
                "": ("warn", "one message with a wrong header stops"),
            },
        ),
    ],
)
async def test_doctor_says_who_could_stop_the_queue(
    settings: dict[str, Any], told: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with everybody(**settings) as made:

        async def checked(context: Context) -> dict[str, Check]:
            monkeypatch.setattr("moorage.bus.target.find_context", lambda *_: context)
            monkeypatch.setattr("moorage.client.connected.find_context", lambda *_: context)
            return {check.name: check async for check in all_checks(Options(tenant="acme", timeout="90s"))}

        for who, (verdict, says) in told.items():
            context = made.site.context(who) if who else made.site.witness_context("MOORAGE")
            async with AsyncClient(context, tenant="acme", timeout=ANSWER_S) as acme:
                await acme.ls()  # somebody leads, and has made the queue
            checks = await checked(context)
            assert (checks["queue"].verdict, says in checks["queue"].found) == (verdict, True), checks["queue"]
        leader = (await checked(made.site.context("ledger.main")))["leader"]
        assert (leader.verdict, "has the ledger alone" in leader.found) == ("ok", True), "it blames no scheduler"
        async with await made.site.connect("scheduler.main") as connection:
            queue = SUBJECTS.request_stream_of("acme") if made.site.site.queue else SUBJECTS.request_stream
            assert (await JetStream(connection).stream_info(queue)).last_seq == 0


@pytest.mark.slow
@pytest.mark.parametrize("site", ["nkey-account-per-tenant", "nkey-cluster-shared"])
async def test_a_schedule_runs_with_everybodys_own_key_and_no_tenant_can_touch_its_time(site: str) -> None:
    async with everybody(**SITES[site]) as made, made.client("submitter.acme") as acme:
        added = await acme.schedules.add("often", "@every 1s", ["true"], overlap="queue")
        assert added.by == "tenant:acme"

        async def has_run() -> bool:
            return (await acme.schedules.show("often")).runs >= 2

        await until(has_run, ANSWER_S, "two runs")
        with pytest.raises(NotFound):
            await acme.schedules.show("other")
        async with await made.site.connect("submitter.acme") as bender:
            for subject in (SUBJECTS.schedule_wish("acme", "often"), SUBJECTS.schedule_run("beta", "often")):
                with pytest.raises(PermissionRefused):
                    await bender.request(subject, b"", ANSWER_S)
            with pytest.raises(PermissionRefused):
                await bender.subscribe(SUBJECTS.scheduled_all, lambda _: None)
        await acme.schedules.remove("often")


# ------------------------------------------------------------------------------------------------------- reflection


@pytest.mark.slow
@pytest.mark.parametrize("site", ["nkey-account-per-tenant", "nkey-shared-account"])
async def test_no_answer_reaches_a_subject_that_its_asker_may_not_write(site: str) -> None:
    """Legal questions whose reply subject names what only others may write: nothing arrives there (H37, H38)."""
    settings = SITES[site]
    queue = not settings.get("shared")
    async with (
        everybody(**settings) as made,
        made.client("submitter.acme") as acme,
        made.client("submitter.beta", "beta") as beta,
        made.client("operator.ana") as ana,
        contextlib.AsyncExitStack() as open_ones,
    ):

        async def worker_is_up() -> bool:
            return [row.state for row in (await ana.fleet.show()).workers] == ["up"]

        await until(worker_is_up, ANSWER_S, "the worker: what is recorded of its hello is no answer")
        await acme.submit(["true"], job="known", gpu="1xMI250", on_no_match="wait")
        await beta.submit(["true"], job="known", gpu="1xMI250", on_no_match="wait")
        heard: list[tuple[str, Delivery]] = []
        for account in ("MOORAGE", "MOORAGE_LEDGER"):
            witness = await open_ones.enter_async_context(await made.site.witness(account))

            def hear(delivery: Delivery, account: str = account) -> None:
                heard.append((account, delivery))

            await witness.subscribe(">", hear)
        await settled(witness)
        targets = [
            SUBJECTS.ledger_record, SUBJECTS.ledger_epoch, SUBJECTS.snapshot("1"),
            SUBJECTS.worker("w1", "wanted"), SUBJECTS.worker("w1", "renew"), SUBJECTS.worker("w1", "logs"),
            SUBJECTS.api("beta", "submit"), SUBJECTS.request("beta", "submit"), SUBJECTS.events("beta"),
            SUBJECTS.history("beta"), SUBJECTS.log("beta", "known", 0), SUBJECTS.dead_letter("acme"),
            SUBJECTS.admin("drain", "ana"), SUBJECTS.fleet_frame, SUBJECTS.roll_call,
            "_INBOX.submitter.beta.x.1", "_INBOX.worker.w1.x.1", "_INBOX.scheduler.main.x.1",
            "_INBOX.observer.graf.x.1", "$JS.API.STREAM.PURGE.MOORAGE_REQUEST",
            "$JS.API.STREAM.DELETE.MOORAGE_HISTORY", "$O.MOORAGE_RESULT_beta.C.x",
        ]  # fmt: skip
        async with await made.site.connect("submitter.acme") as bender:
            for target in targets:
                for verb in API_VERBS:
                    await bender.send([(SUBJECTS.api("acme", verb), b'{"job": "bent"}', target)])
                await bender.send([(SUBJECTS.api("acme", "submit"), b"not even JSON", target)])
                if queue:
                    await bender.send([(SUBJECTS.request("acme", "submit"), b"{}", target)])
            await bender.send([(SUBJECTS.api("acme", "show"), b'{"job": "known"}', "_INBOX.operator.ana.x.1")])
            await settled(bender)
            # answered behind all of it, in the same tick or a later one
            assert (await acme.job("known").show()).state == "QUEUED"
        await settled(witness)
        marks = (b'"answer"', b'"error"', b'"accepted"', b'"stream"', b"answer", b"accepted")
        bent = [
            (account, delivery.subject, delivery.data[:200])
            for account, delivery in heard
            if delivery.subject in targets and any(mark in delivery.data for mark in marks)
            and b'"kind":"history"' not in delivery.data and b'"kind":"dead-letter"' not in delivery.data
        ]  # fmt: skip
        assert not bent, bent
        assert (await beta.job("known").show()).state == "QUEUED"
        await until(worker_is_up, ANSWER_S, "the worker, which heard nothing that it would mind")
        async with await made.site.connect("scheduler.main") as own:
            js = JetStream(own)
            of = SUBJECTS.request_stream_of("acme") if queue else SUBJECTS.request_stream
            for stream in (of, SUBJECTS.dead_letter_stream):
                await js.stream_info(stream)  # none is gone
            await stream_is_there(own, SUBJECTS.history_stream)


@pytest.mark.slow
async def test_a_job_is_of_the_tenant_of_its_subject_whatever_its_body_says() -> None:
    """A body that names a tenant is refused (strict requests), and its headers and driver_config name none either."""
    async with (
        everybody() as made,
        made.client("submitter.acme") as acme,
        made.client("submitter.beta", "beta") as beta,
    ):
        await acme.ls()  # somebody leads
        async with await made.site.connect("submitter.acme") as connection:
            body = request("spoofed") | {"tenant": "beta"}
            answer = await ask(connection, SUBJECTS.api("acme", "submit"), body)
            assert (answer["kind"], answer["code"], answer["field"]) == ("error", "invalid-argument", "$.tenant")
            for verb in ("show", "ls", "history", "explain"):
                await beta.submit(["true"], job="betas", gpu="1xMI250", on_no_match="wait")
                answer = await ask(connection, SUBJECTS.api("acme", verb), {"job": "betas", "tenant": "beta"})
                assert "betas" not in str(answer.get("data", "")), (verb, answer)
            answer = await ask(connection, SUBJECTS.api("acme", "cancel"), {"job": "betas", "tenant": "beta"})
            assert (await beta.job("betas").show()).state == "QUEUED"
            labelled = request("mine", labels={"tenant": "beta"}, run={"env": {"MOORAGE_TENANT": "beta"}})
            labelled["run"]["argv"] = ["sh", "-c", "test $MOORAGE_TENANT = acme"]
            answer = await ask(connection, SUBJECTS.api("acme", "submit"), labelled)
            assert answer["kind"] == "accepted", answer
        assert (await acme.job("mine").result()).state == "SUCCEEDED"
        assert {row.job for row in (await beta.ls()).jobs} == {"betas"}
        with pytest.raises(Rejected):
            await acme.submit({"run": {"argv": ["true"]}, "tenant": "beta"})


async def ask(connection: Connection, subject: str, body: dict[str, Any]) -> Any:
    return msgspec.json.decode((await connection.request(subject, msgspec.json.encode(body), ANSWER_S)).data)


@pytest.mark.slow
async def test_a_tenant_that_comes_later_is_served_after_the_reloads_that_the_page_names() -> None:
    async with everybody() as made, made.client("submitter.acme") as acme:
        await acme.ls()  # somebody leads
        write(msgspec.structs.replace(made.site.site, tenants=("acme", "beta", "late")), made.site.folder)
        for _ in range(RELOADS):
            await made.site.reload()
        async with made.client("submitter.late", "late") as late:
            assert (await late.submit(["true"], gpu="1xT4")).accepted is not None
        assert (await acme.ls()).jobs == []


@pytest.mark.slow
async def test_each_key_hears_what_it_may_do_in_place_of_what_it_may_not(tmp_path: Path) -> None:
    """By the command, as people meet it: a tenant that is not named, an observer who asks, a doctor for every role."""
    async with everybody() as made, made.client("submitter.acme") as acme:
        await acme.ls()  # somebody leads
        env = {**made.site.environment, "MOORAGE_HOME": str(tmp_path)}
        unnamed = await moorage("ls", "--nats", "submitter.acme", env=env)
        assert (unnamed.code, "no jobs of tenant acme" in unnamed.err) == (0, True), "its key names the tenant"
        named = await moorage("ls", "--nats", "submitter.acme", "--tenant", "beta", env=env)
        assert (named.code, "name your tenant" in named.err) == (4, False)
        asked = await moorage("fleet", "--nats", "observer.graf", env=env)
        assert (asked.code, "fix: moorage fleet --watch" in asked.err) == (4, True)
        job = await acme.submit(["true"], gpu="1xT4")
        await job.result()
        heard = made.site.folder / "server-0.log"
        refused = heard.read_text().count(" Violation ")
        shown = await moorage("show", "--nats", "operator.ana", "--tenant", "acme", job.job, env=env)
        assert shown.code == 0, shown.err
        for key in ("operator.ana", "observer.graf", "worker.w1", "scheduler.main", "submitter.acme"):
            told = await moorage("doctor", "--nats", key, env=env)
            assert told.code == 0, (key, told.out)
            warned = {row[1] for row in told.rows if row[0] == "warn"}
            # the workers of this test have no other user for jobs, which no person's machine is judged by
            of_host = {"root jobs"} if key in ("worker.w1", "scheduler.main") else set()
            assert warned == of_host, "nothing is wrong with a key as the command makes it"
            # nobody is told to give it a right that its role does not have
            assert "moorage.events" not in told.out
            if key == "operator.ana":
                assert "only a user with a tenant's key can submit jobs" in told.out
                assert "of that of scheduler " in told.out or "behind that of scheduler " in told.out
                assert heard.read_text().count(" Violation ") == refused, "it asks nothing that it may not"
        assert "this user may read and submit jobs of tenant acme" in told.out
        told = await moorage("doctor", "--nats", "submitter.acme", "--tenant", "beta", env=env)
        assert (told.code, "name another tenant with --tenant" in told.out) == (1, True)


def test_operators_read_what_they_hear_anyway() -> None:
    assert set(OPERATOR_READS) < set(API_VERBS)
    assert not {"submit", "cancel", "logs"} & set(OPERATOR_READS)
