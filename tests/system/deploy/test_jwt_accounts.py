"""moorage on a server whose accounts are JWTs: the users of a site with a creds file each, and one job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moorage.bus.errors import PermissionRefused
from moorage.schemas.roles import inbox, rights
from moorage.schemas.subjects import Subjects
from tests.jwt_sites import running_jwt
from tests.system.cli.node import moorage, start

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "use-the-nats-you-have.md"


def test_the_page_gives_a_tenant_its_rights_and_no_more() -> None:
    options = dict(re.findall(r"--((?:allow|deny)-\w+) '?([^'\s]+)'?", PAGE.read_text()))
    may = rights("submitter", "vision", Subjects())
    expected = {"allow-pub": may.publish, "allow-sub": may.subscribe, "deny-pub": may.refused}
    assert {name: tuple(sorted(words.split(","))) for name, words in options.items()} == expected


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
async def test_a_job_runs_on_a_server_with_jwt_accounts_and_no_tenant_is_another(tmp_path: Path, shared: bool) -> None:
    async with running_jwt(tenants=("vision", "speech"), workers=("n01",), shared=shared) as site:
        env = {**site.environment, "MOORAGE_LEDGER_URL": "ledger.main"}
        scheduler = await start("scheduler", "--nats", "scheduler.main", env=env)
        state = str(tmp_path / "n01")
        words = ("worker", "--nats", "worker.n01", "--id", "n01", "--simulate", "1x2xT4", "--state", state)
        worker = await start(*words, env=env)
        run = ("run", "--gpu", "1xT4", "--job", "first", "--nats")
        ran = await moorage(*run, "submitter.vision", "--timeout", "60s", "--", "echo", "hello", env=env)
        assert (ran.code, ran.out) == (0, "hello\n"), ran.err
        foreign = await moorage("ls", "--nats", "submitter.speech", "--tenant", "vision", env=env)
        assert (foreign.code, "permission-refused" in foreign.err) == (4, True)
        assert (await moorage("fleet", "--nats", "operator.ana", env=env)).code == 0
        for process in (worker, scheduler):
            process.terminate()
            await process.communicate()


async def test_no_tenant_hears_what_its_callers_are_answered() -> None:
    """As with `nats-config`, though their inboxes are below its own."""
    async with (
        running_jwt(tenants=("vision",), workers=(), callers=("vision.door",)) as site,
        await site.connect("submitter.vision") as vision,
        await site.connect("caller.vision.door") as door,
    ):
        await (await door.subscribe(f"{inbox('caller', 'vision.door')}.x", lambda _: None)).unsubscribe()
        await (await vision.subscribe(f"{inbox('submitter', 'vision')}.x", lambda _: None)).unsubscribe()
        with pytest.raises(PermissionRefused):
            await vision.subscribe(f"{inbox('caller', 'vision.door')}.x", lambda _: None)
