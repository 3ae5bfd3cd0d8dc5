"""What an agent costs while 64 jobs share its 8 GPUs under the memory guard: `python -m bench.sharers [SECONDS]`.

The production agent, supervisor and guard, real processes, and pynvml over the stub of NVML in C. The stub reads its
state anew in every call, so NVML's part is an upper bound. It tells processor seconds for each second of the clock, of
the process that has the agent and the few lines of its leader: idle, and with the sharers.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from moorage.bus.embedded import EmbeddedServer
from moorage.schemas.codec import encode
from moorage.schemas.frames import Place
from moorage.worker.agent.agent import Agent
from moorage.worker.agent.run import start
from moorage.worker.drivers.conformance.leader import ScriptedLeader
from moorage.worker.session.member_messages import MemberName
from moorage.worker.settings import WorkerSettings
from tests.nvidia.stub import Board, Stub
from tests.waiting import until

GPUS, SHARERS, SHARE_MIB, HELD_MIB = 8, 8, 8_000, 4_000
WAIT_S = 300.0


def name_of(number: int) -> MemberName:
    return ("acme", f"j{number}", 0, 1, 10)


async def share(agent: Agent, leader: ScriptedLeader, stub: Stub, folder: Path) -> None:
    """Run the jobs; NVML says of each first process that it holds memory of its GPU."""
    for which in ("pipe", "log"):
        (folder / which).mkdir()
    gpu = {
        "sharing": "mps",
        "share": {"memory_mib": SHARE_MIB},
        "mps_pipe_dir": str(folder / "pipe"),
        "mps_log_dir": str(folder / "log"),
    }
    for number in range(GPUS * SHARERS):
        argv = ["/bin/sh", "-c", f"echo $$ > {folder}/{number}; exec sleep 3600"]
        body = encode({"gpu": gpu, "run": {"argv": argv}})
        await leader.want("w1", Place(*name_of(number), [number % GPUS], "mps", False, body))
    files = [folder / str(number) for number in range(GPUS * SHARERS)]
    await until(lambda: all(file.exists() and file.read_text() for file in files), WAIT_S, "all run")
    for slot, board in enumerate(stub.boards):
        board.pids = {int(file.read_text()): HELD_MIB for file in files[slot::GPUS]}
    stub.write()
    await until(lambda: len(agent.guard._granted()) == GPUS, WAIT_S, "all are guarded")


async def measure(seconds: float, *, shared: bool) -> float:
    """Processor seconds of this process for each second of the clock."""
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as name:
        folder = Path(name)
        uuids = [f"GPU-{n}{n}111111-2222-3333-4444-555555555555" for n in range(GPUS)]
        stub = Stub(folder / "stub", *(Board(uuid, pci=f"00000000:{n}7:00.0") for n, uuid in enumerate(uuids)))
        (stub.folder / "calls").unlink()  # so that not every call is written to it
        server = await EmbeddedServer.start(folder / "nats", sync_always=False)
        async with ScriptedLeader(server.url, "bench") as leader:
            with stub.load():
                settings = WorkerSettings(folder / "state", "w1", "bench", modes=("exclusive", "mps"), leases=False)
                running = await start(settings, server.url)
                agent = running.agents[0]
                await leader.joined("w1")
                if shared:
                    await share(agent, leader, stub, folder)
                began_s, before_s = time.monotonic(), time.process_time()
                await asyncio.sleep(seconds)
                part = (time.process_time() - before_s) / (time.monotonic() - began_s)
                if agent.guard.why_not or len(agent.members.held) != (GPUS * SHARERS if shared else 0):
                    raise RuntimeError(f"not what was to be measured: {agent.guard.why_not}, {agent.members.held}")
                for board in stub.boards:
                    board.pids = {}
                stub.write()
                agent.leave()
                await asyncio.wait_for(agent.left.wait(), WAIT_S)
                await running.stop()
        await server.stop()
    return part


async def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    for shared in (False, True):
        part = await measure(seconds, shared=shared)
        what = f"{GPUS * SHARERS} sharers" if shared else "nothing"
        print(f"{what} on {GPUS} GPUs: {100 * part:.2f} % of a core")


if __name__ == "__main__":
    asyncio.run(main())
