"""Settings that are paths: the supervisor, and what it starts, have another current folder than the agent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from moorage.schemas.settings import read_file
from moorage.testing.conformance.bench import open_bench
from moorage.worker.agent.run import start
from moorage.worker.settings import WorkerSettings, settings_from, worker_settings


async def test_a_process_job_runs_where_the_state_folder_is_named_from_the_current_one(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(nats_url, "process", 20.0) as bench:
        monkeypatch.chdir(bench.folder)
        table = {"id": "w1", "state_dir": "state", "prefix": bench.settings.prefix, "simulate": "1xH100"}
        running = await start(settings_from(table | {"drivers": ["process"], "leases": False}), nats_url)
        try:
            await bench.joined()
            name = bench.name()
            await bench.place(name, {"run": {"argv": ["true"]}})
            exited = await bench.ended(name)
            assert (exited.code, exited.detail) == (0, "exit")
        finally:
            await running.stop()


def test_every_path_is_absolute_wherever_it_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moorage.toml").write_text('[worker]\nsecrets_dir = "kept"\n')
    file = read_file(Path("moorage.toml"))
    env = {"MOORAGE_WORKER_MPS_DIR": "mps"}
    found, _ = worker_settings({"state_dir": "state"}, Path("elsewhere"), env=env, file=file)
    assert (found.state_dir, found.secrets_dir, found.mps_dir) == tuple(
        map(tmp_path.joinpath, ("state", "kept", "mps"))
    )
    assert worker_settings({}, Path("elsewhere"), env={})[0].state_dir == tmp_path / "elsewhere/here"
    assert WorkerSettings(Path("state")).state_dir == tmp_path / "state"
    assert msgspec.structs.replace(found, state_dir=Path("other")).state_dir.name == "other"
