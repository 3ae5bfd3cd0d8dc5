"""Tenants on one host: jobs run as users of their own, and see nothing of each other's or of the agent's.

Needs root, which the machines that test this have; two users without names are enough.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from moorage.client import AsyncClient
from moorage.worker.agent.run import SUPERVISOR_FOLDER
from tests.servers import Server
from tests.system.live.stack import ANSWER_S, Stack, caller, stack
from tests.waiting import until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may run jobs as others")

#: so many user ids stand for tenants, from the first one on, above those that machines have
UIDS_FROM: Final = 1 << 20
UIDS: Final = 1 << 30


class Users(NamedTuple):
    """User ids of one test alone: others run beside it, and each looks for all processes of its own."""

    acme: int
    beta: int
    folders: Path  # of their jobs: the folders of tests let no other user pass

    @property
    def settings(self) -> dict[str, Any]:
        users = {"acme": str(self.acme), "beta": str(self.beta)}
        return {"run_as_for": users, "folder_dir": str(self.folders), "folder_keep": 0}


@pytest.fixture
def users() -> Iterator[Users]:
    acme = UIDS_FROM + 2 * secrets.randbelow(UIDS // 2)
    with tempfile.TemporaryDirectory(prefix="moorage-jobs-", ignore_cleanup_errors=True) as folders:
        Path(folders).chmod(0o711)
        yield Users(acme, acme + 1, Path(folders))


async def said(made: Stack, job: str, tenant: str = "acme") -> str:
    """Everything that a job has written, as a client reads it from the worker that keeps it."""
    async with AsyncClient(made.url, tenant=tenant, prefix=made.subjects.prefix, timeout=ANSWER_S) as client:
        return "".join([piece.text async for piece in client.job(job).logs()])


def shell(script: str, **fields: Any) -> dict[str, Any]:
    return {"run": {"argv": ["sh", "-c", script]}, **fields}


@pytest.mark.slow
@needs_root
async def test_a_job_is_its_tenants_user_with_nothing_of_the_agents(
    nats_server: Server, unique: str, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_IN_THE_AGENT", "planted-7d1f")
    monkeypatch.setenv("NATS_URL", "nats://user:planted-7d1f@127.0.0.1:1")
    groups = os.getgroups()
    os.setgroups([*groups, users.acme + 7])  # the agent inherits it from here, its jobs must not
    try:
        await _is_its_tenants_user(nats_server, unique, users)
    finally:
        os.setgroups(groups)


async def _is_its_tenants_user(nats_server: Server, unique: str, users: Users) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        agent = await made.agent("w", "1x2xT4", worker="w", **users.settings)
        await acme.leader()
        script = (
            "id -u; id -g; id -G; umask; echo home=$HOME; grep -E 'NoNewPrivs|CapEff|Groups' /proc/self/status; "
            "env; ls -l /proc/self/fd; echo again > /dev/stdout; cat /proc/$PPID/environ 2>&1 || true"
        )
        await acme.submit("who", **shell(script))
        await acme.reaches("who", "SUCCEEDED")
        [groups] = re.findall(r"^Groups:(.*)", Path(f"/proc/{agent.process.pid}/status").read_text(), re.MULTILINE)
        assert str(users.acme + 7) in groups.split(), "the agent has no group that its jobs could have"
        text = await said(made, "who")
        lines = text.splitlines()
        assert lines[:4] == [*3 * [str(users.acme)], "0077"], text
        assert any(line.startswith(f"home={users.folders}/") for line in lines), text
        assert "NoNewPrivs:\t1" in lines
        assert "CapEff:\t0000000000000000" in lines
        assert "again" in lines, "a job may open its own output"
        assert "planted-7d1f" not in text
        assert "Permission denied" in text, "the supervisor's environment was readable"
        names = {line.partition("=")[0] for line in lines if "=" in line and line[0].isupper()}
        assert not names & {"NATS_URL", "MOORAGE_LEDGER_URL", "PLANTED_IN_THE_AGENT", "PYTHONPATH"}, names


@pytest.mark.slow
@needs_root
async def test_a_job_cannot_reach_the_supervisor_or_another_tenants_job_or_output(
    nats_server: Server, unique: str, users: Users, tmp_path: Path
) -> None:
    kept = tmp_path / "secrets"
    kept.mkdir(mode=0o700)
    (kept / "token").write_text("planted-91ab")
    (kept / "token").chmod(0o600)
    async with stack(nats_server, unique) as made, caller(made) as acme, caller(made, "beta") as beta:
        made.folder.chmod(0o755)  # what protects is the worker's own folder
        for above in tmp_path.parents:
            if above.stat().st_uid == 0 and str(above).startswith("/tmp/"):
                above.chmod(0o755)
        await made.scheduler()
        rules = users.settings | {"secrets_for": {"beta": "token"}}
        agent = await made.agent("w", "1x2xT4", worker="w", secrets_dir=str(kept), **rules)
        await acme.leader()
        await beta.submit("victim", **shell("echo planted-output-3c; exec sleep 600"))
        await beta.reaches("victim", "RUNNING")
        state = made.folder / "w"
        supervisor = await made.supervisor("w")
        children = await until(lambda: _of_user(users.beta), ANSWER_S, "beta's process")
        victim = min(children)

        def said_it() -> list[Path]:
            outputs = (state / SUPERVISOR_FOLDER).rglob("*.stdout")
            return [path for path in outputs if b"planted-output-3c" in path.read_bytes()]

        [output] = await until(said_it, ANSWER_S, "beta's output")
        script = f"""
            kill -0 $PPID && echo REACHED supervisor
            for pid in $(ls /proc | grep -E '^[0-9]+$'); do
                test -r /proc/$pid/environ && test $(stat -c %u /proc/$pid) != {users.acme} && echo REACHED environ $pid
            done
            kill -0 {agent.pid} && echo REACHED agent
            kill -9 {victim} && echo REACHED victim
            cat /proc/{victim}/environ && echo REACHED environ
            cat {output} && echo REACHED output
            ls {state} {output.parent} && echo REACHED folder
            cat {kept}/token && echo REACHED secret
            ls {kept} && echo REACHED secrets
            for door in {state}/*.sock {state}/{SUPERVISOR_FOLDER}/*.sock; do test -w $door && echo REACHED $door; done
            echo done
        """
        await acme.submit("spy", **shell(script))
        await acme.reaches("spy", "SUCCEEDED", "FAILED")
        text = await said(made, "spy")
        assert "done" in text
        assert "REACHED" not in text, text
        assert "planted" not in text, text
        # nor is a secret to be had by its name
        named = shell("env", run={"argv": ["env"], "env": {"TOKEN": {"secret": "token"}}})
        await acme.submit("asks", **named)
        why = (await acme.reaches("asks", "FAILED"))["changes"][-1]["why"]
        assert why.startswith("not-here: not-permitted: tenant acme may not have the secret token on this worker"), why
        await beta.submit("asks", **named)
        await beta.reaches("asks", "SUCCEEDED")
        assert "TOKEN=planted-91ab" in await said(made, "asks", "beta")
        # the agent pages the victim's output all the same, and ends it
        page = await beta.api("logs", {"job": "victim"})
        assert "planted-output-3c" in page["data"]["text"], page
        await beta.api("cancel", {"job": "victim"})
        await beta.reaches("victim", "CANCELLED")
        await until(lambda: not _of_user(users.beta), ANSWER_S, "nothing of beta left")
        supervisor.close()


def _of_user(uid: int) -> dict[int, str]:
    """Processes of a user and what they run, by /proc."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
    return found


@pytest.mark.slow
@needs_root
async def test_a_restarted_agent_takes_up_and_ends_jobs_of_other_users(
    nats_server: Server, unique: str, users: Users
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        agent = await made.agent("w", "1x2xT4", worker="w", **users.settings)
        await acme.leader()
        # a grandchild in a session of its own, as a daemon would be
        await acme.submit("long", **shell("setsid sleep 600 & exec sleep 600"))
        await acme.reaches("long", "RUNNING")

        def settled() -> dict[int, str] | None:
            found = _of_user(users.acme)
            return found if list(found.values()) == ["sleep 600", "sleep 600"] else None

        before = await until(settled, ANSWER_S, "both processes")
        await agent.kill()
        await made.agent("w", "1x2xT4", worker="w", **users.settings)
        await acme.workers_up("w")
        assert _of_user(users.acme) == before
        assert (await acme.show("long"))["state"] == "RUNNING"
        await acme.api("cancel", {"job": "long"})
        await acme.reaches("long", "CANCELLED")
        await until(lambda: not _of_user(users.acme), ANSWER_S, "no process of the tenant left")
        await acme.all_free()


@pytest.mark.slow
async def test_what_a_worker_does_not_permit_is_told_with_code_and_reason(nats_server: Server, unique: str) -> None:
    """A program and a driver send the job elsewhere, and its history says why; no worker that may start it is left."""
    rules: dict[str, Any] = {
        "programs_for": {"acme": "sh /bin/echo"},
        "drivers_for": {"acme": "process", "beta": "noop"},
    }
    async with stack(nats_server, unique) as made, caller(made) as acme, caller(made, "beta") as beta:
        await made.scheduler()
        await made.agent("w", "1x2xT4", worker="w", drivers=["process", "noop"], **rules)
        await acme.leader()
        await acme.submit("allowed", "sh", "-c", "true")
        await acme.reaches("allowed", "SUCCEEDED")
        await acme.submit("forbidden", "/bin/cat", "/etc/passwd")
        shown = await acme.reaches("forbidden", "FAILED")
        last = shown["changes"][-1]
        why = "not-here: not-permitted: tenant acme may not start /bin/cat on this worker (allowed: sh, /bin/echo)"
        assert (last["code"], last["why"]) == (126, f"{why} (refused by w)"), last
        await acme.submit("bent", "sh", "-c", "true", run={"env": {"PATH": "/tmp"}})
        assert "may not set PATH" in (await acme.reaches("bent", "FAILED"))["changes"][-1]["why"]
        await beta.submit("elsewhere", "sh", "-c", "true")

        async def refused() -> dict[str, Any] | None:
            explained = (await beta.api("explain", {"job": "elsewhere"}))["data"]
            return explained if "not-permitted" in str(explained.get("because", "")) else None

        explained = await until(refused, ANSWER_S, "the reason in explain")
        assert explained["because"].startswith("not-permitted: tenant beta may not have the driver process"), explained
        assert (explained["state"], explained["reason"]) == ("QUEUED", "rules")
        shown = await beta.show("elsewhere")
        assert [move["state"] for move in shown["changes"]] == ["ACCEPTED"], "told with the join: nobody had to refuse"
        # a second worker without the rule takes it
        await made.agent("free", "1x2xT4", worker="free")
        await beta.reaches("elsewhere", "SUCCEEDED")
