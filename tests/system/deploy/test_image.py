"""The image of `deploy/Dockerfile`, and the fleet of `deploy/compose.yml` that runs from it: jobs go on when a server
is killed, and when the leader is.

No registry of images is needed: the base of the image is Debian 13 with its Python, the image of Prometheus is made of
Debian's program, both brought by tests/system/deploy/build. Grafana is in no package, so it is the one service that is
not started here; what it is given is checked in test_board.py.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.system.build import build
from tests.containers import why_no_docker
from tests.system.deploy.parts import parts, why_no_parts
from tests.system.deploy.wheels import bring_wheels

ROOT: Final = Path(__file__).resolve().parents[3]
DEPLOY: Final = ROOT / "deploy"
#: the tag that deploy/compose.yml names
PROMETHEUS: Final = "moorage-test:prometheus"
COMMAND_S_MAX: Final = 300.0
#: a takeover with a ledger on three servers takes 13.5 s, a scrape comes every 5 s
HAPPENS_S: Final = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.downloads, pytest.mark.image]


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def image(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Built as the Dockerfile says, with the wheels of all that it needs beside its own: no network."""
    if why := why_no_docker() or why_no_parts():
        pytest.skip(why)
    context, tag = tmp_path_factory.mktemp("context"), f"moorage:test-{secrets.token_hex(4)}"
    shutil.copy(ROOT / "constraints.txt", context)
    shutil.copytree(published, context / "dist")
    bring_wheels(context / "dist")
    base = f"{tag}-base"
    run("docker", "import", parts() / "debian.tar", base)
    try:
        run(
            *("docker", "build", "--quiet", "--file", str(DEPLOY / "Dockerfile"), "--tag", tag, "--network=none"),
            *("--build-arg", f"PYTHON={base}", "--build-arg", "PIP_NO_INDEX=1"),
            *("--build-arg", "PIP_FIND_LINKS=/dist", str(context)),
        )
        yield tag
        run("docker", "image", "rm", tag)
    finally:
        run("docker", "image", "rm", base)


def test_it_runs_as_nobody_without_a_right_and_has_no_sources(image: str) -> None:
    bare = ("docker", "run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL")
    assert run(*bare, image, "--version").split()[-1] == build()
    shown = json.loads(run("docker", "image", "inspect", image))[0]["Config"]
    assert shown["User"] == "65532:65532"
    assert "MOORAGE_ALIVE_FILE" in str(shown["Healthcheck"])
    assert [word.partition("=")[0] for word in shown["Env"] if "moorage" in word.lower()] == [
        "PATH",
        "XDG_CONFIG_HOME",
        "MOORAGE_ALIVE_FILE",
    ]
    listed = run(
        *bare, "--entrypoint=sh", image, "-c", "ls -d /dist /source /empty 2>/dev/null; id -u; ls -A /etc/moorage"
    )
    assert listed.split() == ["65532"]


def test_a_scheduler_that_reaches_no_server_is_not_healthy(image: str) -> None:
    at = run("docker", "run", "--detach", "--network=none", "--health-start-period=0s", "--health-interval=1s",
             image, "scheduler", "--nats", "nats://127.0.0.1:1")  # fmt: skip
    try:
        begins = time.monotonic()
        while (state := run("docker", "inspect", "-f", "{{.State.Health.Status}}", at.strip()).strip()) == "starting":
            assert time.monotonic() - begins < HAPPENS_S
        assert state == "unhealthy"
    finally:
        run("docker", "rm", "--force", at.strip())


class Fleet:
    """What `docker compose` runs under a project of the test's own."""

    def __init__(self, image: str, ports: dict[str, str]) -> None:
        self._project = f"moorage-test-{secrets.token_hex(4)}"
        self._env = {"MOORAGE_IMAGE": image, **ports}
        self.ports = ports

    def compose(self, *words: str) -> str:
        composition = ("--project-name", self._project, "--file", str(DEPLOY / "compose.yml"))
        return run(parts() / "docker-compose", *composition, *words, **self._env)

    def moorage(self, service: str, *words: str) -> str:
        return self.compose("run", "--rm", "--no-TTY", service, *words)

    def query(self, expression: str) -> list[dict[str, Any]]:
        at = f"http://127.0.0.1:{self.ports['MOORAGE_PROMETHEUS_PORT']}/api/v1/query?"
        with urllib.request.urlopen(at + urllib.parse.urlencode({"query": expression}), timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


def happens(what: str, seen: Callable[[], bool]) -> None:
    begins = time.monotonic()
    while not seen():
        assert time.monotonic() - begins < HAPPENS_S, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def prometheus_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Debian's program, in place of the image that deploy/compose.yml names."""
    if why := why_no_docker() or why_no_parts():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("prometheus")
    run("docker", "import", parts() / "debian.tar", "moorage-test-base:prometheus")
    shutil.copy(parts() / "prometheus", folder)
    (folder / "Dockerfile").write_text(
        "FROM moorage-test-base:prometheus\nCOPY prometheus /bin/prometheus\n"
        'RUN mkdir /prometheus && chown 65534:65534 /prometheus\nUSER 65534\nENTRYPOINT ["/bin/prometheus"]\n'
    )
    run("docker", "build", "--quiet", "--tag", PROMETHEUS, "--network=none", folder)
    yield
    run("docker", "image", "rm", PROMETHEUS, "moorage-test-base:prometheus")


@pytest.fixture(scope="module")
def fleet(image: str, prometheus_image: None) -> Iterator[Fleet]:
    fleet = Fleet(
        image,
        {
            "MOORAGE_PROMETHEUS_IMAGE": PROMETHEUS,
            "MOORAGE_PROMETHEUS_PORT": "29090",
            "MOORAGE_GRAFANA_PORT": "23000",
            "MOORAGE_PAGE_PORT": "29480",
        },
    )
    services = set(fleet.compose("config", "--services").split()) - {"grafana"}
    try:
        fleet.compose("up", "--detach", "--wait", *sorted(services - {"keys"}))
        yield fleet
    finally:
        fleet.compose("down", "--volumes", "--timeout", "1")


def test_one_command_brings_a_fleet_up_that_runs_jobs_and_is_scraped(fleet: Fleet) -> None:
    assert fleet.moorage("command", "run", "--gpu", "2xH100", "--", "echo", "hello").splitlines()[0] == "hello"
    rows = json.loads(fleet.moorage("operator", "fleet", "--json"))["data"]["workers"]
    assert [(row["worker"], row["gpus"], row["simulated"]) for row in rows] == [("n01", 8, True), ("n02", 4, True)]
    happens("it is scraped", lambda: [row["value"][1] for row in fleet.query("sum(moorage_gpus)")] == ["12"])
    assert fleet.query("moorage_ledger_copies")[0]["value"][1] == "3"


def test_the_page_shows_the_map_and_no_job(fleet: Fleet) -> None:
    def shown(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{fleet.ports['MOORAGE_PAGE_PORT']}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    happens(
        "both hosts are on the map", lambda: 'data-worker="n01"' in shown("/") and 'data-worker="n02"' in shown("/")
    )
    assert "takes an operator&#39;s key" in shown("/queue")


def test_ports_are_on_loopback_alone(fleet: Fleet) -> None:
    config = json.loads(fleet.compose("config", "--format", "json"))
    published = [port for each in config["services"].values() for port in each.get("ports", [])]
    assert len(published) == 3
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}


def test_a_server_is_killed_and_then_the_leader_and_jobs_go_on(fleet: Fleet) -> None:
    def ran(word: str) -> bool:
        said = fleet.moorage("command", "run", "--gpu", "1xL40S", "--timeout", "60s", "--", "echo", word)
        return said.splitlines()[0] == word

    fleet.compose("kill", "--signal", "SIGKILL", "nats-2")
    assert ran("without-a-server")
    happens("Prometheus sees the copy that is gone", lambda: bool(fleet.query("moorage_ledger_copies_lacking == 1")))
    fleet.compose("up", "--detach", "--wait", "nats-2")
    happens("the copy is back", lambda: bool(fleet.query("moorage_ledger_copies_lacking == 0")))
    leader = json.loads(fleet.moorage("operator", "fleet", "--json"))["data"]["leader"]
    fleet.compose("kill", "--signal", "SIGKILL", leader)
    assert ran("without-the-leader")
    fleet.compose("up", "--detach", "--wait", leader)
