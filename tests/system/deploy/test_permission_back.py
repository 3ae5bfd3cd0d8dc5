"""An accounts file that is broken and mended under a fleet: nobody hears anything meanwhile, not even answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from moorage.client import AsyncClient
from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import Event
from tests.system.deploy.test_roles_live import Everybody, everybody
from tests.system.live.stack import ANSWER_S
from tests.waiting import until

#: what a user with rights may hear: with nothing in its place the user hears nothing, its answers included
_HEARS: Final = re.compile(r"subscribe: \{ allow: \[.*?\n          \] \}", re.DOTALL)
REFUSED: Final = "this NATS user may not subscribe to"
AGAIN: Final = "the NATS server takes the subscription to"
#: inboxes of the scheduler in the users' account, at least: its own, and that of the process that writes the history
INBOXES: Final = 2
#: by the log: one of the subjects that its process hears
STANDING: Final = {"scheduler": "moorage.api.*.*", "worker": "moorage.worker.w1.wanted"}


def words(made: Everybody, which: str) -> str:
    """The log of a process without the breaks of its lines."""
    [process] = [each for each in made.processes if each.log.name == f"{which}.log"]
    assert process.process.returncode is None, process.words()
    return " ".join(process.words().split())


@pytest.mark.slow
async def test_scheduler_worker_and_client_go_on_when_broken_accounts_are_mended(tmp_path: Path) -> None:
    """A job runs on through it, and is told of; all three stayed deaf until they were started again."""
    async with everybody() as made, made.client("submitter.acme") as acme:
        await goes_on(made, acme, tmp_path / "go")


async def goes_on(made: Everybody, acme: AsyncClient, go: Path) -> None:
    accounts = made.site.folder / "accounts.conf"
    whole = accounts.read_text()
    up = go.with_name("up")
    script = f"echo up >> {up}; while [ ! -e {go} ]; do sleep 0.1; done"
    running = await acme.submit(["sh", "-c", script], job="runs-through", gpu="1xT4")
    await until(lambda: up.exists(), what="it runs")
    events = running.events(ANSWER_S)
    await anext(events)  # it is followed: what is refused from the beginning is told at once
    end = asyncio.create_task(last_state(events))

    await until(partial(has_history, acme), what="the process that writes the history is there")
    broken, count = _HEARS.subn('subscribe: { deny: [">"] }', whole)
    assert count >= 4, whole
    accounts.write_text(broken)
    await made.site.reload()
    for which, subject in STANDING.items():
        refused = f"{REFUSED} {subject}"
        await until(lambda w=which, said=refused: said in words(made, w), what=f"the {which} says that it is refused")
        assert AGAIN not in words(made, which)
    inbox = f"{REFUSED} _inbox.scheduler.main."
    await until(lambda: words(made, "scheduler").count(inbox) >= INBOXES, what="both processes are refused")

    accounts.write_text(whole)
    await made.site.reload()
    again = await acme.submit(["true"], job="after", gpu="1xT4")
    assert (await again.result(ANSWER_S)).state == "SUCCEEDED"
    go.touch()
    assert await end == "SUCCEEDED"
    assert up.read_text() == "up\n", "it was started once"
    for which, subject in STANDING.items():
        await until(lambda w=which: words(made, w).count(AGAIN) >= words(made, w).count(REFUSED), what="all are over")
        said = words(made, which)
        assert said.count(REFUSED) == said.count(AGAIN), said
        assert said.count(f"{REFUSED} {subject}") == 1, said
        assert said.count(f"{AGAIN} {subject} again") == 1, said


async def has_history(acme: AsyncClient) -> bool:
    """Whether that process has answered: until it reads the ledger it is `behind`."""
    with contextlib.suppress(MoorageError):
        await acme._wire.answer("usage", {"by": ["tenant"], "since_s": 60})
        return True
    return False


async def last_state(events: AsyncIterator[Event]) -> str:
    return [event.state async for event in events][-1]
