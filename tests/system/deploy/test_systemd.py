"""The units of `deploy/systemd` on a real systemd, which boots Debian 13 in namespaces of its own: from the wheel
alone, with the user, the keys and the settings of the page. What hangs is started again, and jobs outlive it.

Needs root and systemd-nspawn (Debian: systemd-container), and what tests/system/deploy/build brings.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.system.deploy.parts import parts, why_no_parts
from tests.system.deploy.wheels import bring_wheels
from tests.unit.docs.markdown import DOCS, page

DEPLOY: Final = DOCS.parent / "deploy" / "systemd"
UNITS: Final = ("moorage-nats", "moorage-scheduler", "moorage-worker", "moorage-metrics", "moorage-page")
COMMAND_S_MAX: Final = 120.0
HAPPENS_S: Final = 90.0
#: in place of the units' minute
WATCHDOG_S: Final = 4

pytestmark = [pytest.mark.slow, pytest.mark.downloads, pytest.mark.image]


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def why_no_systemd() -> str:
    if os.geteuid() != 0 or shutil.which("systemd-nspawn") is None:
        return "no systemd of a test's own: it needs root, and systemd-nspawn of Debian's systemd-container"
    return why_no_parts("debian.tar")


class Booted:
    """A machine in a folder, with an init of its own, no network but its loopback, and the time of this one."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self._init = 0
        self._nspawn: subprocess.Popen[bytes] | None = None

    def before(self, *command: str, **bind: Path) -> str:
        """Run a command on the machine while it is off."""
        binds = [f"--bind-ro={there}:/{here}" for here, there in bind.items()]
        return run("systemd-nspawn", "--quiet", "-D", self.tree, "--register=no", "--keep-unit", *binds, *command)

    @contextlib.contextmanager
    def booted(self) -> Iterator[None]:
        self._nspawn = subprocess.Popen(
            ["systemd-nspawn", "-D", str(self.tree), "--boot", "--register=no", "--keep-unit", "--private-network"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "UNIFIED_CGROUP_HIERARCHY": "1", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
        )  # fmt: skip
        try:
            happens("it boots", self._boots)
            yield
        finally:
            self._nspawn.terminate()  # it is shut down in order
            self._nspawn.wait(COMMAND_S_MAX)

    def _boots(self) -> bool:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, "nspawn has ended"
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        inits = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd"]
        self._init = int(inits[0]) if inits else 0
        if not self._init:
            return False
        asked = ["nsenter", f"--target={self._init}", "--all", "systemctl", "is-system-running"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=COMMAND_S_MAX)
        return told.stdout.strip() in ("running", "starting", "degraded")

    def run(self, *command: str) -> str:
        """Run a command on the machine while it runs."""
        return run("nsenter", f"--target={self._init}", "--all", *command)

    def property_of(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "--property", name, "--value", unit).strip()

    def stop_forever(self, unit: str) -> int:
        """SIGSTOP the main process of a unit, as a loop that hangs; return its pid there."""
        pid = int(self.property_of(unit, "MainPID"))
        self.run("/usr/bin/kill", f"-{signal.SIGSTOP.value}", str(pid))
        return pid

    def get(self, where: str) -> str:
        """Return what a port of the machine's loopback answers in HTTP."""
        asked = f"from urllib.request import urlopen; print(urlopen('http://{where}').read().decode())"
        return self.run("python3", "-c", asked)

    def moorage(self, *words: str) -> str:
        env = ("env", "XDG_CONFIG_HOME=/etc/moorage", "MOORAGE_TENANT=vision")
        return self.run(*env, "/opt/moorage/bin/moorage", *words)


def happens(what: str, seen: Callable[[], bool]) -> None:
    begins = time.monotonic()
    while not seen():
        assert time.monotonic() - begins < HAPPENS_S, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def machine(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    if why := why_no_systemd():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("machine")
    wheels, machine = folder / "dist", Booted(folder / "tree")
    shutil.copytree(published, wheels)
    bring_wheels(wheels)
    machine.tree.mkdir()
    run("tar", "--extract", "--file", parts() / "debian.tar", "--directory", machine.tree)
    for name in ("dev", "proc", "sys"):
        (machine.tree / name).mkdir(exist_ok=True)
    [wheel] = (file.name for file in wheels.glob("moorage-*-manylinux*.whl"))
    machine.before("python3", "-m", "venv", "/opt/moorage")
    offline = ("--quiet", "--no-index", "--no-cache-dir", "--find-" + "links=/dist")
    machine.before("/opt/moorage/bin/pip", "install", *offline, f"/dist/{wheel}[server,metrics,page]", dist=wheels)
    machine.before(
        *("/opt/moorage/bin/moorage", "admin", "nats-config", "--out", "/etc/moorage"),
        *("--store", "/var/lib/moorage/jetstream", "--tenant", "vision", "--worker", "n01", "--operator", "metrics"),
        *("--observer", "page"),
    )
    (machine.tree / "var/lib/moorage").mkdir()  # as where a data disk is mounted: root's, and useradd leaves it so
    for command in _of_the_page("useradd"):
        machine.before("sh", "-c", command)
    settings = (DEPLOY / "moorage.toml").read_text() + 'simulate = "1x8xH100"\n'
    (machine.tree / "etc/moorage/moorage.toml").write_text(settings)
    units = machine.tree / "etc/systemd/system"
    for name in UNITS:
        shutil.copy(DEPLOY / f"{name}.service", units)
        if "WatchdogSec" in (units / f"{name}.service").read_text():
            (units / f"{name}.service.d").mkdir()
            (units / f"{name}.service.d" / "soon.conf").write_text(f"[Service]\nWatchdogSec={WATCHDOG_S}\n")
        machine.before("systemctl", "enable", "--quiet", name)
    with machine.booted():
        yield machine


def _of_the_page(word: str) -> list[str]:
    [block] = [block for block in page(DOCS / "how-to/run-as-a-service.md").blocks if block.body.startswith(word)]
    return block.body.splitlines()


def test_every_unit_is_active_and_a_job_runs(machine: Booted) -> None:
    for name in UNITS:
        happens(f"{name} is active", lambda name=name: machine.property_of(name, "ActiveState") == "active")  # type: ignore[misc]
    assert machine.moorage("run", "--nats", "submitter.vision", "--gpu", "2xH100", "--", "echo", "ran").startswith(
        "ran"
    )
    assert "moorage_up 1.0" in machine.get("127.0.0.1:9470/metrics")
    happens("the page has the host", lambda: 'data-worker="n01"' in machine.get("127.0.0.1:9480/"))
    for name in ("moorage-scheduler", "moorage-worker", "moorage-metrics", "moorage-page"):
        assert machine.property_of(name, "Type") == "notify"
        assert machine.property_of(name, "NRestarts") == "0"
    users = {name: machine.property_of(name, "User") for name in UNITS}
    assert users == {**dict.fromkeys(UNITS, "moorage"), "moorage-worker": ""}


@pytest.mark.parametrize("name", ["moorage-scheduler", "moorage-worker"])
def test_what_hangs_is_started_again_and_a_job_outlives_it(machine: Booted, name: str) -> None:
    job = f"outlives-{name}"
    machine.moorage("submit", "--nats", "submitter.vision", "--gpu", "1xH100", "--job", job, "--", "sleep", "600")

    def shown() -> tuple[str, int]:
        told = json.loads(machine.moorage("ls", "--nats", "submitter.vision", "--json"))["data"]
        [row] = [row for row in told["jobs"] if row["job"] == job]
        return row["state"], row["attempt"]

    happens("it runs", lambda: shown() == ("RUNNING", 1))
    before = machine.stop_forever(name)
    happens(f"{name} is started again", lambda: machine.property_of(name, "NRestarts") == "1")
    happens("and is ready", lambda: machine.property_of(name, "ActiveState") == "active")
    assert int(machine.property_of(name, "MainPID")) != before
    assert re.search(r"[Ww]atchdog", machine.run("journalctl", "--no-pager", "--unit", name))
    happens("the job runs on", lambda: shown() == ("RUNNING", 1))
    machine.moorage("cancel", "--nats", "submitter.vision", job)
    happens("it obeys who leads", lambda: shown()[0] == "CANCELLED")
