"""A driver of the user's own, named among a worker's drivers as module:Class."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.schemas.errors import Refused
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.run import start
from moorage.worker.settings import WorkerSettings


class Unnamed(NoopDriver):
    name = ""


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("nosuch:Driver", "there is no module 'nosuch'"),
        ("pathlib:Path", "it is no Driver"),
        ("moorage.worker.drivers.noop:NoopDriver", "its name 'noop' is taken or empty"),
        ("tests.worker.test_own_driver:Unnamed", "its name '' is taken or empty"),
        ("podman", "no driver podman"),
    ],
)
async def test_what_is_no_driver_is_refused_before_anything_starts(tmp_path: Path, word: str, told: str) -> None:
    settings = WorkerSettings(tmp_path, "w1", simulate="1xH100", drivers=("noop", word))
    with pytest.raises(Refused) as refused:
        await start(settings, "nats://127.0.0.1:9")
    problem = refused.value.problem
    assert told in problem.message
    assert problem.field == "$.drivers"
