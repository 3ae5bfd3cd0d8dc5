"""A site of three servers by what `moorage admin nats-config` wrote: three copies, and never one in silence."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from msgspec import to_builtins

from moorage.bus.connection import Connection
from moorage.cli.doctor.checks_fleet import of_fleet
from moorage.client import AsyncClient
from moorage.client.view.checks import Check
from moorage.schemas.errors import MoorageError
from moorage.schemas.subjects import Subjects
from tests.sites import RunningSite, running
from tests.system.cli import forks
from tests.system.live.stack import ANSWER_S, RealProcess
from tests.waiting import until

pytestmark = pytest.mark.slow

SUBJECTS: Final = Subjects()
THREE: Final = "write `replicas = 3` under [scheduler] in the schedulers' settings file, moorage.toml"


@contextlib.asynccontextmanager
async def scheduler(site: RunningSite, log: Path, *words: str, **variables: str) -> AsyncIterator[RealProcess]:
    """A scheduler as the pages start it, with the site's keys; killed at the end."""
    environment = {**os.environ, **site.environment, "MOORAGE_LEDGER_URL": "ledger.main", **variables}
    with log.open("wb") as out:
        argv = ("-m", "moorage.cli", "scheduler", "--nats", "scheduler.main", *words)
        process = await forks.python(*argv, env=environment, out=out, cwd=log.parent)
    made = RealProcess(process, log)
    try:
        yield made
    except BaseException:
        print(made.words())
        raise
    finally:
        await made.kill()


async def refused(site: RunningSite, log: Path) -> str:
    """What a scheduler says that nobody told how many copies there are to be; it ends with an error."""
    async with scheduler(site, log) as made:
        assert await asyncio.wait_for(made.process.wait(), ANSWER_S) == 1, made.words()
        return made.words()


async def streams(ledger: Connection) -> list[str]:
    answer = await ledger.request("$JS.API.STREAM.NAMES", b"", ANSWER_S)
    return sorted(msgspec.json.decode(answer.data).get("streams") or [])


async def copies_line(site: RunningSite, **known: Any) -> Check:
    """Doctor's line, once the leader knows this of the copies."""
    async with AsyncClient(site.context("operator.ana"), timeout=ANSWER_S) as ana:

        async def line() -> Check | None:
            with contextlib.suppress(MoorageError):  # none leads yet
                fleet = await ana.fleet.show()
                if known.items() <= to_builtins(fleet.ledger_copies).items():
                    return next(check for check in of_fleet(fleet) if check.name == "copies")
            return None

        found: Check = await until(line, ANSWER_S, f"copies of which {known} is known")
        return found


async def test_a_site_of_three_servers_gets_three_copies_by_its_own_settings_and_none_without_them(
    tmp_path: Path,
) -> None:
    """Its ledger had one copy, and nothing said so until that server was lost."""
    async with running(servers=3) as site:
        said = await refused(site, tmp_path / "default.log")
        assert "error[failed-precondition]: JetStream is a cluster (moorage-1, moorage-2, moorage-3)" in said
        assert THREE in said
        async with await site.connect("ledger.main") as ledger:
            assert await streams(ledger) == [], "nothing is made, and nothing is left of the question"
        settings = str(site.folder / "moorage.toml")
        async with scheduler(site, tmp_path / "three.log", MOORAGE_SETTINGS=settings) as made:
            line = await copies_line(site, wanted=3, lacking=[])
            assert (line.verdict, line.found.partition(",")[0]) == (
                "ok", "all 3 copies of the ledger are up to date",
            )  # fmt: skip
            assert "WARNING" not in made.words()


async def test_one_copy_on_a_cluster_is_said_on_purpose_and_told_at_each_start_and_in_the_outage(
    tmp_path: Path,
) -> None:
    async with running(servers=3) as site:
        for number, words in enumerate((("--replicas", "1"), ())):  # the second one finds a ledger
            async with scheduler(site, tmp_path / f"{number}.log", *words) as made:
                line = await copies_line(site, wanted=1, servers=["moorage-1", "moorage-2", "moorage-3"])
                assert line.verdict == "warn"
                assert "moorage admin restore FILE --replace --replicas 3" in line.fix
                told = "WARNING moorage.ledger the ledger has one copy, on nats-server moorage-"
                assert told in " ".join(made.words().split()), made.words()
                if not words:
                    await told_in_the_outage(site, line.found)


async def told_in_the_outage(site: RunningSite, found: str) -> None:
    """Kill the server with the only copy, as doctor names it; the answer to a submit names it, too."""
    [holder] = [name for name in ("moorage-1", "moorage-2", "moorage-3") if f"one copy, on {name}," in found]
    site.processes[int(holder[-1]) - 1].kill()
    async with await site.connect("submitter.acme") as acme:

        async def answer() -> str:
            with contextlib.suppress(MoorageError):
                request = {"v": 1, "job": "waits", "run": {"argv": ["true"]}}
                asked = SUBJECTS.api("acme", "submit")
                return (await acme.request(asked, msgspec.json.encode(request), 5.0)).data.decode()
            return ""

        async def is_told() -> bool:
            return f"its ledger has one copy, on {holder};" in await answer()

        await until(is_told, ANSWER_S, "the outage's message")


async def test_of_two_servers_one_copy_has_to_be_said_and_why(tmp_path: Path) -> None:
    async with running(servers=3, started=2) as site:
        said = await refused(site, tmp_path / "two.log")
        assert "a cluster of which two servers run (moorage-1, moorage-2)" in said
        assert "two copies would be no better" in said
        assert "to stay with two servers, write `replicas = 1` there" in said


async def test_a_server_in_no_cluster_gets_a_ledger_of_one_copy_and_doctor_says_so(tmp_path: Path) -> None:
    async with running() as site, scheduler(site, tmp_path / "one.log") as made:
        line = await copies_line(site, wanted=1, holder="moorage-1")
        assert (line.verdict, line.found) == ("ok", "the ledger has one copy, on moorage-1")
        assert "WARNING" not in made.words()
