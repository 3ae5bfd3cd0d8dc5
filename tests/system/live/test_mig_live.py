"""A GPU is divided otherwise by the command, under a real scheduler and a real worker, over a stub of NVML in C."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.schemas.cells import FREE
from tests.nvidia.stub import Board, Stub
from tests.system.live.stack import QUICK, caller, stack
from tests.waiting import until

GPU = "GPU-11111111-2222-3333-4444-555555555555"
#: the command, on the prefix of a test
COMMAND = (
    "import sys; from moorage.schemas import subjects; import moorage.client.connected as c;"
    "c.Subjects = lambda prefix='': subjects.Subjects(sys.argv[1]);"
    "from moorage.cli.main import main; main(sys.argv[2:])"
)
OTHER = "GPU-22222222-2222-3333-4444-555555555555"


@pytest.mark.slow
async def test_a_worker_is_drained_divided_and_open_again_with_the_new_slices(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    boards = Board(GPU, more={"divides": 1}), Board(OTHER, pci="00000000:2A:00.0")
    stub = Stub(tmp_path / "stub", *boards)
    spec, program, called = tmp_path / "cdi" / "nvidia.json", tmp_path / "bin" / "nvidia-ctk", tmp_path / "called"
    for file in (spec, program):
        file.parent.mkdir()
    devices = [{"name": uuid, "containerEdits": {"env": ["A=b"]}} for uuid in (GPU, OTHER)]
    spec.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}))
    program.write_text(f'#!/bin/sh\necho "$@" >>{called}\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    environment = stub.environment | {"CDI_SPEC_DIRS": str(spec.parent), "PATH": path}
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        await made.agent("w", None, worker="w", environment=environment)
        await acme.workers_up("w")

        async def mig(layout: str) -> tuple[int, str]:
            words = ["admin", "mig", "w", "0", layout, "--at-most", "10m", "--nats", made.url]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", COMMAND, made.subjects.prefix, *words, env=os.environ | environment,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            said = (await process.communicate())[0].decode()
            return process.returncode or 0, said

        async def row() -> dict[str, Any]:
            (found,) = (await acme.admin("fleet", {"worker": "w"}))["data"]["workers"]
            return dict(found)

        await acme.submit("runs", gpu={}, run={"argv": ["/bin/sleep", "600"]})
        await acme.reaches("runs", "RUNNING")
        asked = asyncio.create_task(mig("3g.40gb,2x1g.10gb"))
        await until(lambda: _is_flag(row, "draining"), 60, "it drains")
        assert stub.calls("nvmlDeviceSetMigMode", GPU) == 0, "it waits for the job"
        await acme.api("cancel", {"job": "runs"})
        code, said = await asked
        assert code == 0, said
        assert "3 slices" in said
        assert (f"the CDI spec {spec} is made anew" in said, called.read_text()) == (
            True, f"cdi generate --output={spec}\n",
        )  # fmt: skip
        warned = await until(lambda: _warned(row), 60, "the slices are not in the spec")
        assert (warned, (await row())["cells"]) == ([("cdi", 1), ("cdi", 2), ("cdi", 3)], FREE * 4)
        now = await row()
        assert (now["flag"], [device.get("profile", "") for device in now["devices"]]) == (
            "open", ["", "3g.40gb", "1g.10gb", "1g.10gb"],
        )  # fmt: skip
        await acme.submit("small", gpu={"profile": "1g.10gb"}, run={"argv": ["/bin/true"]})
        await acme.reaches("small", "SUCCEEDED")
        program.unlink()
        code, said = await mig("off")
        assert f"nvidia-ctk is not on the PATH, and {spec} is older than the devices" in said
        assert (code, [each["uuid"] for each in (await row())["devices"]]) == (0, [GPU, OTHER]), said
        code, said = await mig("3x3g.40gb")
        assert (code != 0, "no such slices" in said, (await row())["flag"]) == (True, True, "open"), said


async def _is_flag(row: Any, flag: str) -> bool:
    return bool((await row())["flag"] == flag)


async def _warned(row: Any) -> list[tuple[str, int]]:
    return [(trouble["kind"], trouble["slot"]) for trouble in (await row())["troubles"]]
