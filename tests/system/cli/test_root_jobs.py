"""Whether jobs may run as root is said by the doctor, by a worker's log at its start and join, and decided by what
`nats-config` writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moorage.cli.doctor import checks_host
from moorage.cli.fleet.nats_config import WORKER_SETTINGS
from moorage.schemas.settings import made, read_file, settle
from moorage.worker.drivers.policy import ROOT_FIX, ROOT_OPEN
from moorage.worker.settings import SECTION, WorkerSettings
from tests.system.cli.node import Lines, Node, moorage, start


@pytest.mark.parametrize("words", [(), ("--root-jobs", "refuse")])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's workers can start jobs as root")
async def test_a_worker_says_at_its_start_and_at_its_join_that_jobs_may_run_as_root(
    node: Node, unique: str, tmp_path: Path, words: tuple[str, ...]
) -> None:
    name = f"root-{unique}"
    worker = await start("worker", "--id", name, "--state", str(tmp_path / "state"), *words, env=node.env())
    lines = Lines(worker.stderr)
    await lines.until(f"joined as {name}")
    if words:
        worker.terminate()
        await worker.wait()
        assert ROOT_OPEN not in lines.text
    else:
        await lines.until(f"{name}: {ROOT_OPEN}; {ROOT_FIX}")
        worker.terminate()
        await worker.wait()
        assert lines.text.index(ROOT_OPEN) < lines.text.index(f"joined as {name}")


def test_the_doctor_says_whether_jobs_of_a_worker_may_run_as_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "moorage.toml"
    monkeypatch.setenv("MOORAGE_SETTINGS", str(settings))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for text, status in (("", "warn"), ('root_jobs = "refuse"\n', "ok"), ('run_as = "65534"\n', "ok")):
        settings.write_text("[worker]\n" + text)
        settings.chmod(0o600)
        check = checks_host.root_jobs()
        assert check is not None
        assert (check.verdict, check.fix) == (status, ROOT_FIX if status == "warn" else "")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert checks_host.root_jobs() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's workers can start jobs as root")
@pytest.mark.parametrize(("role", "asks"), [("operator.ana", False), ("worker.n1", True)])
async def test_the_doctor_asks_that_of_no_machine_on_which_a_person_uses_a_key(
    tmp_path: Path, role: str, asks: bool
) -> None:
    """On an operator's own machine it warned of a worker that was not there."""
    (tmp_path / "nats/context").mkdir(parents=True)
    context = {"url": "nats://127.0.0.1:1", "inbox_prefix": f"_INBOX.{role}"}
    (tmp_path / f"nats/context/{role}.json").write_text(json.dumps(context))
    ran = await moorage("doctor", "--nats", role, env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert ("\troot jobs\t" in ran.out) == asks, ran.out


def test_the_settings_that_nats_config_writes_for_workers_refuse_jobs_as_root(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(WORKER_SETTINGS)
    path.chmod(0o600)
    file = read_file(path)
    found = settle(SECTION, WorkerSettings, env={}, file=file, defaults={"state_dir": tmp_path})
    assert made(WorkerSettings, found).root_jobs == "refuse"
