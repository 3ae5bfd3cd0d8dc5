"""The page's drop-in that copies backups away, with Debian's rclone."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.system.deploy.parts import parts, why_no_parts
from tests.unit.docs.markdown import DOCS, page

pytestmark = [pytest.mark.slow, pytest.mark.image]


def drop_in() -> configparser.SectionProxy:
    """The section that the page writes beside the unit of backups."""
    blocks = page(DOCS / "how-to" / "run-a-production-cluster.md").blocks
    [body] = [block.body for block in blocks if "away.conf" in block.body]
    found = re.search(r"^\[Service\]\n.*?(?=^END$)", body, re.MULTILINE | re.DOTALL)
    assert found is not None
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(found[0])
    return parser["Service"]


def test_a_backup_goes_away_and_one_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    if why := why_no_parts("rclone"):
        pytest.skip(why)
    backups, away, settings = tmp_path / "backups", tmp_path / "away", tmp_path / "rclone.conf"
    backups.mkdir()
    settings.write_text(f"[away]\ntype = alias\nremote = {away}\n")
    said = drop_in()
    assert said["Environment"] == "RCLONE_CONFIG=/etc/moorage/rclone.conf"
    line = said["ExecStartPost"].replace("/var/lib/moorage/backups", str(backups)).replace("%H", "h1")
    program, *words = shlex.split(line)
    assert program == "/usr/bin/rclone"

    def copy() -> int:
        env = {**os.environ, "RCLONE_CONFIG": str(settings)}
        return subprocess.run([parts() / "rclone", *words], env=env, capture_output=True, check=False).returncode

    (backups / "moorage-1.backup").write_text("one")
    (backups / ".moorage-2.backup.7.partial").write_text("half")
    assert copy() == 0
    assert {file.name for file in (away / "h1").iterdir()} == {"moorage-1.backup"}
    (backups / "moorage-1.backup").write_text("other")
    assert copy() != 0, "the unit fails, and says so"
    assert (away / "h1/moorage-1.backup").read_text() == "one"
    (backups / "moorage-1.backup").unlink()
    (backups / "moorage-3.backup").write_text("three")
    assert copy() == 0
    names = {file.name for file in (away / "h1").iterdir()}
    assert names == {"moorage-1.backup", "moorage-3.backup"}, "what is too old here stays there"
