"""Whose fault it is that a container does not start: the table of the docs, held against what engines have said."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from moorage.schemas.frames import NOT_HERE
from moorage.worker.drivers.container.engine import EngineError
from moorage.worker.drivers.container.faults import CannotStart, pull_fault, start_fault

ROOT: Final = Path(__file__).resolve().parents[4]
PAGE: Final = ROOT / "docs/how-to/run-containers.md"
HEAD: Final = "| what is wrong | with docker | with podman |"


def docker_pull(message: str, status: int = 500) -> CannotStart:
    return pull_fault("a/b:1", EngineError(status, message))


def docker_start(message: str, status: int = 500) -> CannotStart:
    return start_fault(EngineError(status, message), is_created=True)


#: by row of the table what engines said: docker 20.10 and 26.1, podman 4.3 with runc
SAID: Final[dict[str, dict[str, list[CannotStart]]]] = {
    "the registry has no such image": {
        "docker": [
            docker_pull("manifest for 127.0.0.1:5/box:2 not found: manifest unknown: manifest unknown", 404),
            docker_pull("pull access denied for nowhere/none, repository does not exist or may require 'docker login'"),
        ],
        "podman": [
            docker_pull("initializing source docker://127.0.0.1:5/box:2: reading manifest 2 in 127.0.0.1:5/box:"
                        " manifest unknown: manifest unknown"),
        ],
    },
    "the registry refuses the login of this worker": {
        "docker": [docker_pull('Head "http://127.0.0.1:5/v2/box/manifests/1": no basic auth credentials')],
        "podman": [
            docker_pull("initializing source docker://127.0.0.1:5/box:1: unable to retrieve auth token: invalid"
                        " username/password: unauthorized"),
        ],
    },
    "the registry does not answer": {
        "docker": [docker_pull('Get "http://127.0.0.1:9/v2/": dial tcp 127.0.0.1:9: connect: connection refused')],
        "podman": [docker_pull("pinging container registry: dial tcp 127.0.0.1:9: connect: connection refused")],
    },
    "there is no such registry": {
        "docker": [docker_pull('Get "https://nothere.invalid/v2/": dial tcp: lookup nothere.invalid: no such host')],
        "podman": [
            docker_pull("initializing source docker://registry.invalid/none:1: pinging container registry"
                        " registry.invalid: dial tcp: lookup registry.invalid: no such host"),
        ],
    },
    "the disk is full while the image is pulled": {
        "docker": [
            docker_pull("write /var/lib/docker/tmp/GetImageBlob1: no space left on device"),
            docker_pull("failed to register layer: write /large: no space left on device"),
        ],
        "podman": [docker_pull("copying system image from manifest list: writing blob: no space left on device")],
    },
    "no CDI spec has the device, or its spec is broken": {
        "docker": [docker_start("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=7")],
        "podman": [docker_start("setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=7")],
    },
    "a file or hook that the CDI spec names is gone": {
        "docker": [
            docker_start('OCI runtime create failed: runc create failed: unable to start container process: error'
                         ' during container init: error running hook #0: fork/exec /usr/bin/nvidia-cdi-hook: no such'
                         ' file or directory: unknown', 400),
        ],
        "podman": [
            docker_start('runc: runc create failed: unable to start container process: error during container init:'
                         ' error mounting "/usr/lib/libcuda.so.535" to rootfs at "/usr/lib/libcuda.so.535": stat'
                         ' /usr/lib/libcuda.so.535: no such file or directory: OCI runtime attempted to invoke a'
                         ' command that was not found'),
        ],
    },
    "no hook of NVIDIA's, and no CDI spec with the device": {
        "docker": [docker_start('could not select device driver "nvidia" with capabilities: [[gpu compute]]')],
    },
    "the image lacks the program": {
        "docker": [
            docker_start('failed to create task: OCI runtime create failed: exec: "nope": executable file not found'
                         " in $PATH: unknown", 400),
        ],
        "podman": [
            docker_start('runc: runc create failed: exec: "nope": executable file not found in $PATH: OCI runtime'
                      " attempted to invoke a command that was not found"),
        ],
    },
    "the program is a folder, or may not be run": {
        "docker": [docker_start('OCI runtime create failed: exec: "/tmp": permission denied: unknown', 400)],
        "podman": [docker_start('runc: runc create failed: exec: "/tmp": permission denied: OCI permission denied')],
    },
}  # fmt: skip
#: rows that no word of an engine decides, and the tests that show them on a real one
SHOWN: Final = {
    "the image is not here after 30 minutes": "test_an_image_that_does_not_arrive_in_time_sends_the_job_elsewhere",
    "the engine goes away while the image is pulled": "test_a_pull_that_fails_says_whose_fault_it_is",
    "the image is not here, and `pull` is `never`": "test_what_cannot_start_says_whose_fault_it_is",
    "the image lacks the user that it runs as": "test_the_folder_belongs_to_the_user_that_the_image_names",
    "all ports of the tenant's range are in use": (
        "test_no_port_is_given_twice_and_each_goes_round_once_its_container_is_over"
    ),
}


def test_an_image_that_was_removed_before_its_container_was_made_is_no_fault_of_the_job() -> None:
    found = start_fault(EngineError(404, "No such image: a/b:1"), is_created=False)
    assert (found.code, str(found)) == (None, "No such image: a/b:1")


#: what engines said of starts that failed, recorded with each engine's API; the first column says whose fault it is
SENTENCES: Final = [
    line.split("\t") for line in Path(__file__).with_name("start_sentences.tsv").read_text().splitlines()[1:]
]


@pytest.mark.parametrize(("fault", "engine", "status", "sentence"), SENTENCES)
def test_a_recorded_sentence_is_sorted_by_the_step_that_failed(
    fault: str, engine: str, status: str, sentence: str
) -> None:
    found = start_fault(EngineError(int(status), sentence), is_created=True)
    assert found.code == {"host": None, "126": 126, "127": 127}[fault], engine
    assert str(found).startswith(sentence)


def test_an_engine_that_does_not_know_a_device_of_a_spec_is_said_to_have_missed_the_spec() -> None:
    found = start_fault(EngineError(500, "CDI device injection failed: unresolvable CDI devices a.b/c=0"), True)
    assert found.code is None
    assert "Write the spec in place, without a move or a link, or restart the engine" in str(found)


@pytest.mark.parametrize(
    ("sentence", "code"),
    [
        # runc 1.0, which put its source lines in front, and the order of words that runc 1.2 has
        ("OCI runtime create failed: container_linux.go:380: starting container process caused: exec:"
         ' "nope": executable file not found in $PATH: unknown', 127),
        ("OCI runtime create failed: container_linux.go:380: starting container process caused: process_linux.go:545:"
         " container init caused: Running hook #0:: error running hook: exit status 1, stdout: , stderr: exec:"
         ' "ldconfig": executable file not found in $PATH: unknown', None),
        ("runc create failed: unable to start container process: error during container init: error running"
         " createContainer hook #0: fork/exec /usr/bin/nvidia-cdi-hook: no such file or directory", None),
        ("runc create failed: unable to start container process: error during container init: exec:"
         ' "nope": executable file not found in $PATH', 127),
        # CRI-O quotes the runtime's line once more
        (r'container create failed: time="2026-01-01T00:00:00Z" level=error msg="runc create failed: unable to start'
         r' container process: exec: \"nope\": executable file not found in $PATH"', 127),
        # a program that is there, on a host that has no memory for it
        ('runc create failed: unable to start container process: exec: "/bin/sh": cannot allocate memory', None),
    ],
)  # fmt: skip
def test_a_sentence_of_another_release_is_sorted_the_same_way(sentence: str, code: int | None) -> None:
    assert start_fault(EngineError(500, sentence), is_created=True).code == code


def table() -> dict[str, dict[str, str]]:
    """Return the rows of the page: by what is wrong whose fault it is, by driver."""
    text = PAGE.read_text()
    rows = [line.strip("| ").split(" | ") for line in text.split(HEAD)[1].strip().split("\n\n")[0].splitlines()[1:]]
    return {what: {"docker": docker, "podman": podman} for what, docker, podman in rows}


def test_the_table_has_the_faults_that_are_tested_and_no_others() -> None:
    assert set(table()) == {*SAID, *SHOWN}
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/worker/**/test_*.py"))
    for name in SHOWN.values():
        assert f"def {name}(" in tests


@pytest.mark.parametrize("what", SAID)
def test_each_engine_is_understood_as_the_table_says(what: str) -> None:
    for driver, whose in table()[what].items():
        found = {
            "the host" if each.code is None else "not here" if each.mark == NOT_HERE else "the job"
            for each in SAID[what].get(driver, [])
        }
        assert found == (set() if whose == "-" else {whose}), driver
