"""The secrets that a job names: read from files that nobody else can read or replace, and shown nowhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moorage.schemas.job import Secret
from moorage.worker.attempt.environment import lay_over, process_environment
from moorage.worker.attempt.secret_files import SECRET_BYTES_MAX, SecretRefused, resolve_secrets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "secrets"
    path.mkdir(mode=0o700)
    return path


def put(folder: Path, name: str, value: bytes, mode: int = 0o600) -> Path:
    path = folder / name
    path.write_bytes(value)
    path.chmod(mode)
    return path


def refused(folder: Path | None, name: str) -> SecretRefused:
    with pytest.raises(SecretRefused) as found:
        resolve_secrets({"TOKEN": Secret(name)}, folder)
    return found.value


def test_a_secret_is_read_by_name_and_shown_nowhere(folder: Path) -> None:
    put(folder, "hf", b"sesame-4711\n")
    found = resolve_secrets({"SEED": "7", "TOKEN": Secret("hf")}, folder)
    assert found == {"SEED": "7", "TOKEN": "sesame-4711"}
    whole = process_environment(found, {"MOORAGE_JOB": "train"})
    assert whole["TOKEN"] == "sesame-4711"
    for shown in (repr(found), str(found), f"{found}", repr(whole), str(lay_over(found, {}))):
        assert "sesame" not in shown
        assert "TOKEN" in shown


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../hf", "/etc/passwd", "a\0b", "x" * 129])
def test_a_secret_has_a_plain_name(folder: Path, name: str) -> None:
    assert refused(folder, name).fault == "name"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_secret_that_others_may_read_is_refused(folder: Path, mode: int) -> None:
    put(folder, "hf", b"sesame", mode)
    error = refused(folder, "hf")
    assert (error.fault, error.name, error.code) == ("readable-by-others", "hf", "failed-precondition")
    assert "sesame" not in str(error)


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    put(folder, "hf", b"sesame")
    folder.chmod(0o770)
    assert refused(folder, "hf").fault == "folder"


@pytest.mark.parametrize("absent", [None, Path("/nonexistent-folder-of-secrets")])
def test_no_folder_is_refused(absent: Path | None) -> None:
    assert refused(absent, "hf").fault == "folder"


def test_what_is_no_small_text_file_is_refused(folder: Path) -> None:
    assert refused(folder, "absent").fault == "missing"
    (folder / "sub").mkdir(mode=0o700)
    assert refused(folder, "sub").fault == "not-a-file"
    put(folder, "long", b"x" * (SECRET_BYTES_MAX + 1))
    assert refused(folder, "long").fault == "too-large"
    put(folder, "bytes", b"\xff\xfe")
    assert refused(folder, "bytes").fault == "not-text"
    put(folder, "nul", b"a\0b")
    assert refused(folder, "nul").fault == "not-text"
    put(folder, "full", b"x" * SECRET_BYTES_MAX)
    assert len(resolve_secrets({"TOKEN": Secret("full")}, folder)["TOKEN"]) == SECRET_BYTES_MAX


@pytest.mark.skipif(sys.platform != "linux", reason="a FIFO that is opened without blocking")
def test_a_fifo_does_not_hold_the_agent_up(folder: Path) -> None:
    os.mkfifo(folder / "pipe", 0o600)
    assert refused(folder, "pipe").fault == "not-a-file"
