"""`moorage page` with the keys of a site: what each key shows, and what stays closed when the key's rights change."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest

from moorage.client.view.model import SILENT_MS
from tests.system.cli.node import Lines, moorage, start
from tests.system.cli.pages import Served, served
from tests.system.deploy.test_roles_live import Everybody, everybody
from tests.system.live.stack import ANSWER_S
from tests.waiting import until

#: what the operator may publish, and all that the file has of a user
_PUBLISHES: Final = re.compile(r"(# operator ana\n.*?publish: )\{ allow: \[.*?\n          \] \}", re.DOTALL)
_USER: Final = r"      # {role} {name}\n      \{{ nkey.*?\n      \}} \}}\n"
#: the pages that have something of a tenant
OF_TENANTS: Final = ("/", "/queue", "/worker/w1", "/job/acme/runs", "/lanes", "/usage")


def says(page: Served, path: str, cookie: str, text: str) -> Callable[[], Coroutine[Any, Any, bool]]:
    async def found() -> bool:
        return text in (await page.get(path, Cookie=cookie)).text

    return found


async def a_job_that_runs(made: Everybody) -> None:
    async with made.client("submitter.acme") as acme:
        job = await acme.submit(["sleep", "600"], job="runs", gpu="1xT4")
        await anext(step async for step in job.steps() if step.state == "RUNNING")


@pytest.mark.long
@pytest.mark.slow
async def test_a_page_whose_operator_loses_every_right_stays_closed_and_goes_on_once_they_are_back() -> None:
    """It had the jobs of all tenants, and then showed them to everybody who reached it, without its link."""
    async with everybody() as made:
        await a_job_that_runs(made)
        accounts = made.site.folder / "accounts.conf"
        whole = accounts.read_text()
        async with served("--nats", "operator.ana", env=made.site.environment) as page:
            cookie = await page.entered()
            await until(says(page, "/queue", cookie, "acme/runs"), ANSWER_S, "it shows the job")
            taken, count = _PUBLISHES.subn(r'\1{ deny: [">"] }', whole)
            assert count == 1, whole
            accounts.write_text(taken)
            await made.site.reload()
            await until(says(page, "/queue", cookie, "may not publish to moorage.admin"), ANSWER_S, "it says why")
            assert {path: (await page.get(path)).status for path in OF_TENANTS} == dict.fromkeys(OF_TENANTS, 403)
            assert "acme/runs" in (await page.get("/queue", Cookie=cookie)).text

            accounts.write_text(whole)
            await made.site.reload()
            async with made.client("submitter.acme") as acme:
                await acme.submit(["sleep", "600"], job="comes-later", gpu="1xT4")
            await until(says(page, "/queue", cookie, "acme/comes-later"), ANSWER_S, "it asks again")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["operator.ana", "submitter.acme"])
async def test_a_page_whose_key_is_revoked_stays_closed(key: str) -> None:
    role, _, name = key.partition(".")
    async with everybody() as made:
        await a_job_that_runs(made)
        accounts = made.site.folder / "accounts.conf"
        async with served("--nats", key, env=made.site.environment) as page:
            cookie = await page.entered()
            await until(says(page, "/queue", cookie, "acme/runs"), ANSWER_S, "it shows the job")
            revoked, count = re.subn(_USER.format(role=role, name=name), "", accounts.read_text(), flags=re.DOTALL)
            assert count == 1, accounts.read_text()
            accounts.write_text(revoked)
            await made.site.reload()
            await until(says(page, "/queue", cookie, "refused these credentials"), ANSWER_S, "it says why")
            assert {path: (await page.get(path)).status for path in OF_TENANTS} == dict.fromkeys(OF_TENANTS, 403)


@pytest.mark.slow
async def test_an_observer_whose_key_is_revoked_is_not_told_that_no_scheduler_leads() -> None:
    async with everybody() as made, served("--nats", "observer.graf", env=made.site.environment) as page:
        await until(says(page, "/", "", 'data-worker="w1"'), ANSWER_S, "it shows the fleet")
        watching = await start("fleet", "--watch", "--nats", "observer.graf", env=made.site.environment)
        await Lines(watching.stdout).until("\n")
        accounts = made.site.folder / "accounts.conf"
        user = _USER.format(role="observer", name="graf")
        accounts.write_text(re.sub(user, "", accounts.read_text(), flags=re.DOTALL))
        await made.site.reload()
        silent = re.compile(r"<b>connection</b>[^<]*refused these credentials[^<]*no frame of a leader for")

        async def is_told() -> bool:
            text = (await page.get("/")).text
            assert "<b>scheduler</b>" not in text
            return silent.search(text) is not None

        await until(is_told, ANSWER_S + SILENT_MS / 1000, "it says what is wrong")
        assert "error[not-authorized]" in await Lines(watching.stderr).until("refused these credentials")
        watching.send_signal(signal.SIGINT)
        assert await watching.wait() == 130


@pytest.mark.slow
async def test_each_key_has_the_pages_that_it_can_show_and_options_that_do_nothing_are_refused() -> None:
    bars = {
        "operator.ana": ["Fleet", "Queue", "Time", "Past", "Usage"],
        "submitter.acme": ["Queue", "Past", "Usage"],
        "observer.graf": ["Fleet"],
    }
    async with everybody() as made:
        environment = made.site.environment
        await a_job_that_runs(made)
        async with made.client("submitter.acme") as acme:
            await acme.submit(["true"], job="waits", gpu="2xT4")
        for key, bar in bars.items():
            async with served("--nats", key, env=environment) as page:
                cookie = await page.entered() if page.key else ""
                first = await page.get("/", Cookie=cookie)
                if first.status == 303:  # a tenant's first page is the one with its jobs
                    assert (key, first.headers["location"]) == ("submitter.acme", "/queue")
                    first = await page.get("/queue", Cookie=cookie)
                    await until(says(page, "/queue", cookie, "acme/runs"), ANSWER_S, "its jobs")
                    assert "all tenants" not in (await page.get("/queue", Cookie=cookie)).text
                    assert "acme/runs" in (await page.get("/queue?at=0s", Cookie=cookie)).text
                    assert "the fleet is not shown" in (await page.get("/worker/w1", Cookie=cookie)).text
                assert re.findall(r'<a href="/\w*"[^>]*>([A-Z]\w+)</a>', first.text) == bar
                if key == "observer.graf":
                    assert "the past is not shown" in (await page.get("/?at=1m")).text
                else:  # a command is for who reads the page, whose key is another one
                    await until(says(page, "/job/acme/waits", cookie, "moorage submit --instead-of"), ANSWER_S, "a fix")
                    assert key not in (await page.get("/job/acme/waits", Cookie=cookie)).text
        told = await moorage("explain", "waits", "--nats", "operator.ana", "--tenant", "acme", env=environment)
        assert "moorage submit --instead-of waits --nats submitter.acme" in told.err, "an operator's key is refused"
        for key, words, said in (
            ("submitter.acme", ("--operate",), "--operate takes an operator's key"),
            ("observer.graf", ("--operate",), "--operate takes an operator's key"),
            ("observer.graf", ("--output-of", "acme=submitter.acme"), "--output-of is for pages of jobs"),
            ("operator.ana", ("--output-of", "beta=submitter.acme"), "--output-of beta names a key that may not read"),
        ):
            ran = await moorage("page", "--listen", "0", "--nats", key, *words, env=environment)
            assert (ran.code, said in ran.err) == (1, True), ran.err
