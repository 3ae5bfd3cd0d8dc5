"""The whole of it once, in half a minute: real server, scheduler and worker with keys, and both killed with -9."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from tests.system.deploy.test_roles_live import everybody
from tests.system.services.members import FUNCTIONS
from tests.waiting import until

ANSWER_S: Final = 90.0
#: says who it is, and works until its file is there
WORKS: Final = 'echo $$ >> {0}.pids; until [ -e {0} ]; do sleep 0.05; done; echo "try $MOORAGE_ATTEMPT"'
BEFORE: Final = 5


async def pid_of(service: Connection) -> bytes:
    """The process that serves; asked again while none is there, as a caller does."""
    found: list[bytes] = []

    async def ask() -> bool:
        try:
            found.append((await service.request("moorage.call.acme.pid", b"", 5.0)).data)
        except BusError:
            return False
        return True

    await until(ask, ANSWER_S, "an answer of the service")
    return found[0]


async def test_nothing_is_lost_with_scheduler_and_worker_killed(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    async with (
        everybody(calls=True) as made,
        made.client("submitter.acme") as acme,
        await made.site.connect("submitter.acme") as caller,
    ):
        gang = await acme.submit(["sh", "-c", "echo rank $RANK of $WORLD_SIZE"], gpu="2x1xT4", job="gang")
        assert (await gang.result(wait=ANSWER_S)).state == "SUCCEEDED"
        run = {
            "argv": [sys.executable, "-m", "moorage.cli", "serve", "functions:pid"],
            "cwd": str(FUNCTIONS.parent),
            "env": {"PYTHONPATH": ":".join(filter(None, sys.path))},
        }
        await acme.submit({"run": run, "service": {"name": "pid"}}, job="warm")
        warm = await pid_of(caller)
        works = await acme.submit(["sh", "-c", WORKS.format(go_on)], gpu="1xT4", job="works")
        await until(Path(f"{go_on}.pids").exists, ANSWER_S, "the job works")
        queued = [await acme.submit(["true"], gpu="2xT4", job=f"waits-{at}") for at in range(BEFORE)]

        await made.restart("scheduler")
        late = await acme.submit(["true"], gpu="1xT4", job="late")
        await made.restart("worker")
        assert await pid_of(caller) == warm, "calls go on, and to the same process"

        go_on.touch()
        ended = await asyncio.gather(*(job.result(wait=ANSWER_S) for job in (works, late, *queued)))
        assert [each.state for each in ended] == ["SUCCEEDED"] * len(ended)
        assert len(Path(f"{go_on}.pids").read_text().split()) == 1, "the job that worked went on, and began once"
        assert "try 1" in "".join([piece.text async for piece in works.logs(follow=False)])
