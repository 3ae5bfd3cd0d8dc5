"""What writes a snapshot is a process, whose arguments everybody on the machine may read."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from moorage.bus.embedded import HOST, find_binary
from moorage.scheduler.main import command_of
from moorage.scheduler.settings import LEDGER_URL_FILE_VARIABLE, LEDGER_URL_VARIABLE, NATS_VARIABLE, SchedulerSettings
from tests.leftover import ends_with_the_test
from tests.ports import free_ports
from tests.system.cli.node import Lines, start

PASSWORD = "planted-0b7d"


@pytest.mark.slow
async def test_a_follower_finds_a_ledger_with_a_password_that_no_argument_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    conf = tmp_path / "nats.conf"
    conf.write_text(
        f'listen: "{HOST}:{port}"\njetstream {{ store_dir: "{tmp_path}/js" }}\n'
        f"authorization {{ user: one, password: {PASSWORD} }}\n"
    )
    ends_with_the_test(await asyncio.create_subprocess_exec(find_binary(), "-c", str(conf), stderr=-3))
    url = f"nats://one:{PASSWORD}@{HOST}:{port}"
    leader = await start("scheduler", env={NATS_VARIABLE: url})
    await Lines(leader.stderr).until("leading epoch 1")
    for name in (NATS_VARIABLE, LEDGER_URL_VARIABLE, LEDGER_URL_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(NATS_VARIABLE, "")
    before = dict(os.environ)
    words, env = command_of("ledger.snapshots", SchedulerSettings(), url)
    assert dict(os.environ) == before, "it is handed on to the follower alone"
    assert words[0] == sys.executable
    assert not [word for word in words if PASSWORD in word]
    follower = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env={**before, **env})
    out, _ = await follower.communicate()
    assert follower.returncode == 0
    assert len(out.split()) == 3
