"""What a user names and is not there is said where the user looks: one thing of each kind, also while a job runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.client import AsyncClient
from tests.system.cli.node import Node
from tests.waiting import until, until_state

#: of each kind: the words of a command that names it, and what is said
REFUSED = {
    "file": (["run", "--with", "nofile.py", "--", "true"], "there is no file or folder nofile.py"),
    "label": (["run", "--requires", "zone=moon", "--", "true"], "no worker has the label zone"),
    "label of a list": (["ls", "--label", "sweep=nope"], "no jobs of tenant {tenant} with --label sweep=nope"),
    "label of a cancel": (["cancel", "--label", "sweep=nope"], "has the label sweep=nope"),
    "setting": (["run", "--settings", "no.toml", "--", "true"], "no option --settings"),
    "variable": (["run", "--env", "NOPE_NOT_SET", "--", "true"], "the variable NOPE_NOT_SET is not set here"),
    "service": (["call", "nope", "hello"], "has the service nope"),
    "address": (["run", "--nats", "nats://127.0.0.1:1", "--timeout", "1s", "--", "true"], "cannot reach NATS at"),
    "job": (["run", "--after", "nosuch", "--", "true"], "to start after job nosuch, which"),
    "GPU": (["run", "--gpu", "1xNOPE", "--", "true"], "has a GPU of this model; the fleet has"),
}
#: of what a worker alone can know: the words of a run, and what it says at its end
AT_THE_END = {
    "pattern": (["--keep", "nope/**", "--", "true"], "nothing matched 'nope/**' of keep"),
    "checkpoint": (["--checkpoint", "ck", "--", "sh", "-c", "exit 1"], "there is no ck, or nothing in it"),
    "secret": (["--secret", "TOKEN=nope", "--", "true"], "not-here: secret 'nope'"),
    "folder": (["--cwd", "/nope", "--", "true"], "not-here: no folder /nope"),
    "program": (["--", "no-such-program"], "not-here: no program no-such-program"),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_it_is_said_at_once(node: Node, unique: str, kind: str) -> None:
    argv, said = REFUSED[kind]
    ran = await node.run(*argv, tenant=unique)
    assert said.format(tenant=unique) in ran.err
    assert ran.code or kind == "label of a list"


@pytest.mark.parametrize("kind", AT_THE_END)
async def test_it_is_said_as_the_run_ends_and_by_show(node: Node, kind: str) -> None:
    """All jobs are of one tenant: those of several that start nowhere would close the host for a minute."""
    argv, said = AT_THE_END[kind]
    ran = await node.run("run", "--job", kind, *argv, tenant="absent")
    assert said in ran.err
    shown = await node.run("show", kind, tenant="absent")
    assert said in shown.out + shown.err
    waited = await node.run("wait", kind, tenant="absent")
    assert said in waited.out + waited.err


async def test_a_checkpoint_that_is_due_and_not_there_is_said_while_the_job_runs(node: Node, unique: str) -> None:
    words = ("--checkpoint", "ck", "--checkpoint-every", "1s", "--", "sleep", "600")
    assert (await node.run("submit", "--job", "j", *words, tenant=unique)).code == 0

    async def is_said() -> bool:
        return "and no ck was seen in its folder" in (await node.run("show", "j", tenant=unique)).out

    await until(is_said, what="show says that nothing is stored")
    await node.run("cancel", "j", tenant=unique)


async def test_a_check_that_was_never_met_is_said_while_the_job_runs(node: Node, unique: str, tmp_path: Path) -> None:
    """`call` sent its users to `explain`, which said no more than RUNNING."""
    words = ("--service", "s", "--ready", "file:ok", "--", "sleep", "600")
    assert (await node.run("submit", "--job", "j", *words, tenant=unique)).code == 0
    async with AsyncClient(node.url, tenant=unique) as client:
        await until_state(client.job("j"), "RUNNING")
    told = await node.run("explain", "j", tenant=unique)
    assert "its check is file:ok; at 120 s it ends as not-ready" in told.out
    await node.run("cancel", "j", tenant=unique)
