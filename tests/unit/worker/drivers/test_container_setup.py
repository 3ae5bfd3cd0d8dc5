"""The container of a setup: it runs the command, whatever program its image starts by itself."""

from __future__ import annotations

from pathlib import Path

from moorage.schemas.job import Request, Run
from moorage.worker.drivers.base import Assignment
from moorage.worker.drivers.container.config import ContainerSettings, Image, config_of
from moorage.worker.drivers.container.entry import PROGRAM_AT, VARIABLES_AT
from moorage.worker.drivers.container.podman import spec_of
from moorage.worker.drivers.policy import Policy

NO_RULES = Policy({}, {}, {}, None, {})
IMAGE = Image(entry_point=("/entry.sh",), command=("serve",))


def test_an_entry_point_of_the_image_does_not_take_the_command_of_a_setup() -> None:
    words = ["/bin/sh", "-c", "pip install torch"]
    asked = Request(run=Run(driver="docker", image="a", argv=words))
    setup = Assignment(("acme", "setup.1", 0, 1, 7), asked, [], "none", setup="/s")
    plain = config_of(setup, ContainerSettings(), NO_RULES, None, IMAGE, labels={}, log_bytes=0)
    assert (plain["Entrypoint"], plain["Cmd"]) == (words[:2], words[2:])
    assert spec_of(plain, "c", ())["entrypoint"] == words[:2]
    secrets = Path("/v")
    kept = config_of(setup, ContainerSettings(), NO_RULES, None, IMAGE, labels={}, log_bytes=0, variables=secrets)
    assert (kept["Entrypoint"], kept["Cmd"]) == ([PROGRAM_AT, VARIABLES_AT], words)
    job = Assignment(("acme", "a", 0, 1, 7), asked, [], "none")
    own = config_of(job, ContainerSettings(), NO_RULES, None, IMAGE, labels={}, log_bytes=0, variables=secrets)
    assert own["Cmd"] == ["/entry.sh", *words]
