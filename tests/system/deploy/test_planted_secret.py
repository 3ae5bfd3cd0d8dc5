"""A secret is planted and looked for: in every frame of every account, every process, every file and log."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import sys
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.transport import Delivery
from moorage.schemas.subjects import Subjects
from tests.sites import settled
from tests.system.deploy.test_roles_live import Everybody, everybody
from tests.system.live.stack import ANSWER_S
from tests.waiting import until

SECRET: Final = "planted-6e0b9d4a71c2-secret"
#: the value as it is, and as what keeps bytes in JSON would show it (at each of the three places in a group)
SHAPES: Final = (SECRET.encode(), *(base64.b64encode(b" " * at + SECRET.encode())[4:-4] for at in range(3)))
SUBJECTS: Final = Subjects()


def holds_it(data: bytes) -> bool:
    return any(shape in data for shape in SHAPES)


def processes_with_it() -> list[tuple[int, str]]:
    """Processes whose arguments or environment hold it, as root sees them in /proc and so in ps(1)."""
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(entry.name) != os.getpid() and holds_it((entry / name).read_bytes()):
                    found.append((int(entry.name), name))
    return found


def files_with_it(folder: Path) -> list[str]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and holds_it(path.read_bytes()):
            found.append(str(path.relative_to(folder)))
    return found


@pytest.mark.slow
async def test_a_planted_secret_is_in_the_jobs_environment_and_nowhere_else() -> None:
    async with everybody(secrets={"token": SECRET}) as made, contextlib.AsyncExitStack() as open_ones:
        frames: list[tuple[str, str]] = []
        heard = 0

        def hear(account: str, delivery: Delivery) -> None:
            nonlocal heard
            heard += 1
            headers = str(delivery.headers).encode()
            if holds_it(delivery.data) or holds_it(headers) or holds_it(delivery.subject.encode()):
                frames.append((account, delivery.subject))

        for account in made.site.accounts:
            witness = await open_ones.enter_async_context(await made.site.witness(account))
            await witness.subscribe(">", lambda delivery, account=account: hear(account, delivery))  # type: ignore[misc]
            await settled(witness)
        acme = await open_ones.enter_async_context(made.client("submitter.acme"))
        ana = await open_ones.enter_async_context(made.client("operator.ana"))
        proof = made.folder / "proof"
        script = f'printf %s "$TOKEN" | wc -c > {proof}; echo "a secret of ${{#TOKEN}} characters"; sleep 600; true'
        job = await acme.submit(
            {"run": {"argv": ["sh", "-c", script], "env": {"TOKEN": {"secret": "token"}}}}, job="keeper", gpu="1xT4"
        )
        await until(
            lambda: proof.exists() and proof.read_text().strip() == str(len(SECRET)), ANSWER_S, "the job's proof"
        )
        # it runs, and has it; who else?
        having = await until(lambda: len(found := processes_with_it()) >= 2 and found, ANSWER_S, "the shell and sleep")
        assert {where for _, where in having} == {"environ"}, having
        for pid, _ in having:
            assert b"MOORAGE_JOB=keeper" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        # one that fails for its sake, one that is killed, what is told of all of them
        broken = {"argv": ["/no/such/program"], "env": {"TOKEN": {"secret": "token"}}}
        failed = await acme.submit({"run": broken, "gpu": {}}, job="broken")
        assert (await acme.wait([failed]))[0].state == "FAILED"
        for told in (job, failed):
            assert not holds_it(str(await told.show()).encode())
        assert not holds_it(str([row async for row in job.logs(follow=False)]).encode())
        await ana.fleet.show()
        await ana.fleet.audit()
        # the agent is killed and takes it up again; the leader is killed and another folds the ledger
        await made.restart("worker")
        await made.restart("scheduler")
        await job.cancel("over")
        assert (await acme.wait([job]))[0].state == "CANCELLED"
        await run_snapshot(made)
        assert processes_with_it() == []
        assert heard > 20
        assert frames == []
        assert files_with_it(made.folder) == ["secrets/token"], "worker's state, logs of the processes"
        assert files_with_it(made.site.folder) == [], "JetStream: ledger, snapshots, history, queue, dead letters"
        stored = {path.parts[-3] for path in (made.site.folder / "data").rglob("*.blk") if path.stat().st_size}
        assert stored >= {SUBJECTS.ledger_stream, SUBJECTS.snapshot_stream, SUBJECTS.history_stream}, stored


async def run_snapshot(made: Everybody) -> None:
    """The follower, as a leader starts it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moorage.scheduler.ledger.snapshots", "--prefix", SUBJECTS.prefix, "--replicas", "1",
        env={**os.environ, **made.site.environment, "MOORAGE_LEDGER_URL": "ledger.main"},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert len(out.split()) == 3
