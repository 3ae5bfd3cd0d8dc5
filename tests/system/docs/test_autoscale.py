"""docs/examples/autoscale.py as an operator runs it: each worker is a machine, which the hook starts and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Final

import pytest

from moorage.client import AsyncClient
from tests.leftover import ends_with_the_test
from tests.system.cli.node import COMMAND, environment, node_on
from tests.waiting import until

SAMPLE: Final = Path(__file__).resolve().parents[3] / "docs" / "examples" / "autoscale.py"
MOST: Final = 4
#: a machine has a number; what it is asked is a line
HOOK: Final = f"""#!/bin/sh
echo "$*" >> asked
if [ $1 = down ]; then kill $(cat $2.pid); exit; fi
for each in $(seq $2); do
  echo x >> machines; id=$3-$(wc -l < machines)
  {" ".join(COMMAND)} worker --id $id --label pool=$3 --simulate 1x4xH100 --state $PWD/$id >$id.log 2>&1 &
  echo $! > $id.pid
done
"""


@pytest.mark.long
@pytest.mark.slow
async def test_hosts_come_while_jobs_wait_for_them_and_go_once_they_are_idle(tmp_path: Path) -> None:
    settings = tmp_path / "moorage.toml"
    settings.write_text('[scheduler]\ngrowing = ["4xH100"]\n')
    hook = tmp_path / "hook.sh"
    hook.write_text(HOOK)
    hook.chmod(0o700)
    asked_of = tmp_path / "asked"
    env = {"MOORAGE_SETTINGS": str(settings)}
    async with node_on(tmp_path / "up", simulate="1x1xT4", env=env) as node, AsyncClient(node.url) as client:
        with (tmp_path / "autoscale.log").open("wb") as log:
            argv = ("--pool", "spot", "--shape", "4xH100", "--most", str(MOST), "--idle", "4", "--every", "0.5")
            scaling = ends_with_the_test(
                await asyncio.create_subprocess_exec(
                    sys.executable, str(SAMPLE), *argv, "--nats", node.url, str(hook), cwd=tmp_path,
                    env=environment(NATS_URL=node.url), stdout=log, stderr=log,
                )
            )  # fmt: skip

        async def pool() -> list[str]:
            """The states of the pool's hosts that are listed: those that have left are forgotten."""
            return [row.state for row in (await client.fleet.show()).workers if row.labels.get("pool") == "spot"]

        def asked(verb: str) -> list[str]:
            lines = asked_of.read_text().splitlines() if asked_of.exists() else []
            return [line for line in lines if line.startswith(verb)]

        try:
            # a hold is not cured by hosts
            await client.admin.hold(tenant="poor", why="its budget")
            async with AsyncClient(node.url, tenant="poor") as poor:
                await poor.submit(["true"], job="kept", gpu="4xH100")
            jobs = [await client.submit(["sleep", "2"], job=f"job-{at}", gpu="4xH100") for at in range(6)]
            results = await client.wait(jobs, wait="3m")
            assert [each.state for each in results] == ["SUCCEEDED"] * 6
            assert 0 < sum(int(line.split()[1]) for line in asked("up")) <= MOST
            ups = asked("up")

            async def all_gone() -> bool:
                return len(set(asked("down"))) == sum(int(line.split()[1]) for line in ups) and not await pool()

            await until(all_gone, what="every host of the pool is gone, and forgotten")
            assert asked("up") == ups, "no host comes for nothing"
            assert scaling.returncode is None, (tmp_path / "autoscale.log").read_text()

            # and from zero again
            job = await client.submit(["true"], job="later", gpu="2xH100")
            assert (await client.wait([job], wait="3m"))[0].state == "SUCCEEDED"
            assert [line.split()[1] for line in asked("up")[len(ups) :]] == ["1"]
        finally:
            for file in tmp_path.glob("spot-*.pid"):
                try:
                    os.kill(int(file.read_text()), signal.SIGTERM)
                except ProcessLookupError:
                    continue
