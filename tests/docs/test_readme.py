"""What the README shows runs: its Python against the production scheduler, its requests through the decoder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import moorage.client
from moorage.cli.main import VERBS
from moorage.client import SimFleet
from moorage.client.sync import Client
from moorage.schemas.codec import decode_request

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BLOCK = re.compile(r"```(?P<kind>\w+)\n(?P<code>.*?)```", re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [found["code"] for found in BLOCK.finditer(README) if found["kind"] == kind]


def test_its_python_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def simulated() -> Client:
        return Client(transport=SimFleet("2x8xH100"))

    monkeypatch.setattr(moorage.client, "Client", simulated)
    [code] = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    said = capsys.readouterr().out.split()
    assert said[-2:] == ["SUCCEEDED", "0"] or said[-1] == "0", said
    assert "SUCCEEDED" in said


def test_its_requests_and_commands_are_real() -> None:
    verbs = {verb.name for group in VERBS.values() for verb in group}
    lines = [line.split("  #")[0] for block in blocks("sh") for line in block.splitlines() if line.strip()]
    assert lines
    targets = re.findall(r"^([a-z-]+):", (Path(__file__).resolve().parents[2] / "Makefile").read_text(), re.MULTILINE)
    for line in lines:
        words = shlex.split(line)
        if words[0] == "moorage":
            assert words[1] in verbs, line
        elif words[0] == "make":
            assert words[1] in targets, line
        elif words[:2] == ["nats", "req"]:
            decode_request(words[3].encode())
        else:
            assert words[0] == "nats", line


def test_its_links_lead_somewhere() -> None:
    root = Path(__file__).resolve().parents[2]
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (root / target).exists(), target
