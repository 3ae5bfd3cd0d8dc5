"""What the services' own logs say of the server: nobody there, joined, lost and back, and never a secret."""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from moorage.bus.connect_logged import REFUSED_AGAIN_S, REFUSED_MAX, Refusals
from moorage.bus.errors import PermissionRefused
from tests.servers import MortalServer
from tests.system.cli.node import Lines, start


@pytest.mark.slow
async def test_a_scheduler_and_a_worker_say_how_they_are_connected(mortal_server: MortalServer, tmp_path: Path) -> None:
    url = mortal_server.url
    await mortal_server.stop()
    scheduler = await start("scheduler", "--nats", url, env={"MOORAGE_LEDGER_URL": mortal_server.ledger_url})
    words = ("worker", "--id", "n01", "--simulate", "1x2xT4", "--state", str(tmp_path / "n01"))
    worker = await start(*words, "--nats", url)
    leads, works = Lines(scheduler.stderr), Lines(worker.stderr)
    await leads.until(f"no server answers at {url} yet: trying for 10 s")
    await works.until(f"no server answers at {url} yet: trying for 10 s")
    await mortal_server.start()
    await works.until(f"joined as n01, 2 GPUs, at {url}")
    await mortal_server.stop()
    await leads.until(f"disconnected from the NATS server {url}: trying again until it answers")
    await works.until(f"disconnected from the NATS server {url}: trying again until it answers")
    await mortal_server.start()
    await leads.until(f"connected to the NATS server {url} again after ")
    await leads.until("(the ledger) again after ")
    await works.until(f"connected to the NATS server {url} again after ")
    for process in (worker, scheduler):
        process.terminate()
        assert await process.wait() == 0
    assert leads.text.count(f"disconnected from the NATS server {url}: ") == 1
    assert "disk" not in leads.text
    password = urlsplit(mortal_server.ledger_url).password
    assert password
    assert password not in leads.text


def test_a_refusal_is_told_now_and_then_and_only_so_many(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = Refusals(logging.getLogger("moorage.test"), lambda: now)
    tell = refusals.on_error
    for _ in range(3):
        tell(PermissionRefused("publish", "moorage.load.n01"))
    assert [each.getMessage() for each in caplog.records] == [
        "this NATS user may not publish to moorage.load.n01: give the user's role that permission"
    ]
    for at in range(2 * REFUSED_MAX):
        tell(PermissionRefused("publish", f"chosen.{at}"))
    assert len(caplog.records) == REFUSED_MAX
    now = REFUSED_AGAIN_S
    tell(PermissionRefused("publish", "moorage.load.n01"))
    assert len(caplog.records) == REFUSED_MAX + 1


@pytest.mark.parametrize(
    ("operation", "subject", "fix"),
    [
        ("subscription", "_inbox.x7.*", "set inbox_prefix in the nats context"),
        ("subscription", "moorage.worker.n03.wanted", "give worker n03 its own key, or name the key's id with --id"),
        ("subscription", "gpu.eu.worker.n03.logs", "give worker n03 its own key"),
        ("publish", "$js.api.stream.info.moorage_ledger", "MOORAGE_LEDGER_URL_FILE"),
        ("publish", "$js.api.stream.info.moorage_request", "give the user's role that permission"),
        ("publish", "moorage.worker.n03.logs", "give the user's role that permission"),
        ("publish", "moorage.api.vision.ls", "give the user's role that permission"),
    ],
)
def test_a_refusal_names_what_is_wrong(operation: str, subject: str, fix: str) -> None:
    assert fix in PermissionRefused(operation, subject).problem.next
