"""The role of `deploy/ansible`: by ansible-playbook itself, on three machines that are this one in a mount namespace,
with /etc and /var/lib of its own, and a systemctl that writes down what it is asked.

It needs root, and ansible-core of the dependency group `deb`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.system.deploy.machines import ROOT

ROLE: Final = ROOT / "deploy" / "ansible"
RUN_S: Final = 600.0
#: a systemctl that remembers which units run and are enabled
SYSTEMCTL: Final = """#!/bin/sh
echo "$@" >>"$ASKED/log"
for word; do case "$word" in -*) ;; *) last=$word ;; esac; done
case "$1" in
  show)
    echo "LoadState=loaded"
    if [ -e "$ASKED/$last.start" ]; then echo "ActiveState=active"; else echo "ActiveState=inactive"; fi ;;
  is-enabled) [ -e "$ASKED/$last.enable" ] && echo enabled ;;
  start | enable) touch "$ASKED/$last.$1" ;;
esac
"""
WITHIN: Final = """
mount --bind etc /etc
mount --bind lib /var/lib
getent passwd moorage >/dev/null || useradd --system --home-dir /var/lib/moorage --no-create-home moorage
"$@"
find /etc/moorage -type f -printf '%u %m %P\\n'
"""

pytestmark = [pytest.mark.slow, pytest.mark.image, pytest.mark.timeout(1200)]


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = folder / "asked"
        for name in ("etc", "lib", "asked", "programs", "home"):
            (folder / name).mkdir()
        subprocess.run(["cp", "-a", "/etc/.", folder / "etc"], check=True)
        shutil.rmtree(folder / "etc/moorage", ignore_errors=True)
        (folder / "programs/systemctl").write_text(SYSTEMCTL)
        (folder / "programs/systemctl").chmod(0o755)

    def plays(self, inventory: str, *words: str) -> str:
        """Run the play, and return what it printed, and which files are in /etc/moorage by whom."""
        (self.folder / "inventory.ini").write_text(inventory)
        programs = Path(sys.executable).parent
        play = [f"{programs}/ansible-playbook", "-i", f"{self.folder}/inventory.ini", f"{ROLE}/site.yml"]
        play += ["--skip-tags", "package", "-e", f"moorage_command={programs}/moorage", *words]
        env = {
            "PATH": f"{self.folder}/programs:{os.environ['PATH']}", "HOME": str(self.folder / "home"),
            "ASKED": str(self.asked), "LANG": "C.UTF-8", "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCALHOST_WARNING": "false",
        }  # fmt: skip
        (self.asked / "log").unlink(missing_ok=True)
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "bash", "-euc", WITHIN, "bash", *play],
            cwd=self.folder, env=env, capture_output=True, text=True, timeout=RUN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def orders(self) -> list[str]:
        log = (self.asked / "log").read_text().splitlines() if (self.asked / "log").exists() else []
        return [line for line in log if line.split()[0] in ("start", "enable", "reload", "restart")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    if os.geteuid():
        pytest.skip("it needs root")
    if importlib.util.find_spec("ansible") is None:
        pytest.skip("ansible-core is of the dependency group deb: make deb")
    return Machine(tmp_path)


def inventory(servers: tuple[str, ...], workers: tuple[str, ...]) -> str:
    here = f"ansible_connection=local ansible_python_interpreter={sys.executable}"
    return "\n".join(
        ["[moorage_servers]", *(f"{each} {here}" for each in servers),
         "[moorage_workers]", *(f"{each} {here}" for each in workers),
         "[all:vars]", f"ansible_python_interpreter={sys.executable}", ""]
    )  # fmt: skip


def test_the_role_gives_each_machine_its_own_files_and_starts_what_runs_there_once(machine: Machine) -> None:
    site = inventory(("h1", "h2", "h3"), ("n01",))
    given = json.dumps({"moorage_tenants": ["vision", "speech"], "moorage_persons": ["vision/lena"]})
    said = machine.plays(site, "-e", given)
    listed = [line.split() for line in said.splitlines() if line.startswith(("moorage ", "root "))]
    files = {file: owner for owner, _, file in listed}
    assert files["server.conf"] == files["tls/server.3.key"] == files["keys/ledger.main.nk"] == "moorage"
    assert {"keys/submitter.vision.lena.nk", "nats/context/observer.page.json"} <= files.keys()
    settings = (machine.folder / "etc/moorage/moorage.toml").read_text()
    assert 'id = "n01"' in settings
    orders = machine.orders()
    started = [order.split()[1] for order in orders if order.startswith("start ")]
    assert started.index("moorage-nats") < started.index("moorage-scheduler") < started.index("moorage-worker")
    assert {"moorage-metrics.service", "moorage-page.service", "moorage-backup.timer"} <= set(started)
    assert {order.split()[1] for order in orders if order.startswith("enable ")} == set(started)
    (
        machine.folder / "etc/moorage/moorage.toml"
    ).unlink()  # where keys are made it is not a worker's, nor moorage's own
    machine.plays(site, "-e", given)
    assert not [order for order in machine.orders() if order.startswith(("start", "enable", "restart"))]


def test_what_would_change_is_told_without_changing_it(machine: Machine) -> None:
    machine.plays(inventory(("h1",), ("n01",)))
    before = (machine.folder / "etc/moorage/accounts.conf").read_bytes()
    (machine.folder / "etc/moorage/moorage.toml").unlink()
    said = machine.plays(inventory(("h1",), ("n01",)), "--check")
    assert "changed: [n01]" in said
    assert not (machine.folder / "etc/moorage/moorage.toml").exists()
    assert (machine.folder / "etc/moorage/accounts.conf").read_bytes() == before
    assert not [order for order in machine.orders() if order.startswith(("start", "enable", "restart", "reload"))]


def test_the_roles_files_are_in_the_place_where_ansible_looks() -> None:
    names = {str(file.relative_to(ROLE)) for file in ROLE.rglob("*") if file.is_file()}
    tasks = {f"roles/moorage/tasks/{name}.yml" for name in ("keys", "package", "server", "worker")}
    assert tasks <= names
