"""The units and the settings of the page, by what they start: with keys at its paths, below a folder of the test.

The files of `deploy/` are those of the page.
"""

from __future__ import annotations

import asyncio
import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Final

import pytest

from moorage.client import AsyncClient
from tests.sites import running
from tests.system.cli.node import Lines, start
from tests.system.live.stack import ANSWER_S
from tests.unit.docs.markdown import DOCS, page
from tests.waiting import until

PAGE: Final = DOCS / "how-to" / "run-as-a-service.md"
MOORAGE: Final = "/opt/moorage/bin/moorage"
ROOT: Final = DOCS.parent
BACKUP: Final = "moorage-backup.service"
DEPLOY: Final = ROOT / "deploy"


def written(title: str) -> str:
    [block] = [block for block in page(PAGE).blocks if block.title == title]
    return block.body


class AsWritten(configparser.ConfigParser):
    """Names keep their case."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit(title: str) -> dict[str, str]:
    """The service's lines; a unit may say nothing twice here."""
    parser = AsWritten(interpolation=None)
    parser.read_string(written(title))
    # a service of a timer is installed by that
    assert set(parser.sections()) == {"Unit", "Service"} | ({"Install"} if title != BACKUP else set())
    return dict(parser["Service"])


UNITS: Final = [block.title for block in page(PAGE).blocks if block.title.endswith(".service")]


def test_the_files_of_deploy_are_those_of_the_page() -> None:
    shown = {block.title: block.body for block in page(PAGE).blocks if block.title}
    files = [*(DEPLOY / "systemd").iterdir(), DEPLOY / "Dockerfile"]
    assert {file.name: file.read_text() for file in files} == shown


def test_the_image_names_a_python_extras_and_a_command_that_there_are() -> None:
    """tests/system/deploy/test_image.py builds it, where a base image is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (DEPLOY / "Dockerfile").read_text()
    [version] = re.findall(r"^ARG PYTHON=python:([\d.]+)-slim$", text, re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    [extras] = re.findall(r'"\$1\[([\w,-]+)\]"', text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    [entry] = re.findall(r'^ENTRYPOINT \["(\w+)"\]$', text, re.MULTILINE)
    assert entry in project["scripts"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("title", UNITS)
def test_systemd_finds_nothing_wrong_with_a_unit(tmp_path: Path, title: str) -> None:
    program = unit(title)["ExecStart"].split()[0]
    assert program.startswith("/opt/moorage/bin/")
    (tmp_path / title).write_text(written(title).replace(program, "/bin/true").replace("User=moorage", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / title)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, title in done.stderr) == (0, False), done.stderr
    if title == "moorage-worker.service":  # the page says why
        return
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(tmp_path / title)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stdout


def test_there_is_a_unit_for_each_service_and_the_user_that_it_names_is_made() -> None:
    assert UNITS == [
        "moorage-nats.service",
        "moorage-scheduler.service",
        "moorage-worker.service",
        "moorage-metrics.service",
        "moorage-page.service",
        BACKUP,
    ]
    users = {unit(title).get("User") for title in UNITS} - {None}
    text = PAGE.read_text()
    for user in users:
        assert re.search(rf"^useradd .* {user}$", text, re.MULTILINE)
        assert f"chown -R {user}: /etc/moorage" in text


@pytest.mark.slow
async def test_a_worker_that_its_unit_restarts_takes_its_jobs_up(tmp_path: Path) -> None:
    scheduler, worker = unit("moorage-scheduler.service"), unit("moorage-worker.service")
    # systemd's own default ends the whole group: supervisor and jobs
    assert (worker["KillMode"], worker["Delegate"], worker["Restart"]) == ("process", "yes", "always")
    assert (scheduler["Type"], worker["Type"]) == ("notify", "notify")
    manager = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(manager))
        listening.setblocking(False)
        await _restarted(scheduler, worker, tmp_path, manager, listening)


async def _restarted(
    scheduler: dict[str, str], worker: dict[str, str], tmp_path: Path, manager: Path, listening: socket.socket
) -> None:
    async def told(word: str) -> None:
        """Until the manager is told this; beats may come before."""
        async with asyncio.timeout(ANSWER_S):
            while (heard := (await asyncio.get_running_loop().sock_recv(listening, 64)).decode()) != word:
                assert heard == "WATCHDOG=1"

    async with running(workers=("n01",)) as site:
        here = {"/etc/moorage": str(site.folder), "/var/lib/moorage": str(tmp_path / "state")}

        def moved(text: str) -> str:
            for there, instead in here.items():
                text = text.replace(there, instead)
            return text

        (site.folder / "moorage.toml").write_text(moved(written("moorage.toml")))

        async def service(of: dict[str, str]) -> Lines:
            program, *words = shlex.split(moved(of["ExecStart"]))
            assert program == MOORAGE
            env = dict(word.split("=", 1) for word in moved(of["Environment"]).split())
            watchdog = {"NOTIFY_SOCKET": str(manager), "WATCHDOG_USEC": str(int(of["WatchdogSec"]) * 1_000_000)}
            json_log = {"MOORAGE_SCHEDULER_LOG_FORMAT": "json"}
            begun = await start(*words, env={**env, **watchdog, **json_log})
            lines = Lines(begun.stderr)
            pids.append(begun.pid)
            return lines

        pids: list[int] = []
        leads = await service(scheduler)
        await leads.until("leading epoch 1")
        await told("READY=1")
        entries = [json.loads(line) for line in leads.text.rpartition("\n")[0].splitlines()]
        assert {entry["level"] for entry in entries} == {"INFO"}
        assert "log_format = json" in entries[0]["message"]
        first = await service(worker)
        await first.until("joined as n01")
        await told("READY=1")
        async with AsyncClient(site.context("submitter.acme"), tenant="acme", timeout=ANSWER_S) as acme:
            job = await acme.submit(["sleep", "600"], job="kept")

            async def runs() -> bool:
                return bool((await job.show()).state == "RUNNING")

            await until(runs, ANSWER_S, "it runs")
            before = (await job.show()).rev
            os.kill(pids[-1], signal.SIGTERM)  # as KillMode=process does: the agent and nobody else
            await told("STOPPING=1")
            await (await service(worker)).until("joined as n01")
            assert (await job.show()).rev == before
            await job.cancel("over")
            assert (await acme.wait([job]))[0].state == "CANCELLED"
