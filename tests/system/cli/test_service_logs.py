"""What the services' own logs say of the server: nobody there, joined, lost and back, and never a secret."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

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
