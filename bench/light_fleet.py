"""A great fleet that does nothing, in one process: `light_fleet.py URL STATE 10000 GPUS`.

What its workers say is what agents say, byte for byte: a join, then a load frame and a renewal every two seconds each,
spread evenly. They take no work. Prints how many there are once all are joined and renewed.
"""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from moorage.bus.connection import Connection, connect
from moorage.bus.inbox import Mux
from moorage.client.asking import Asking
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Problem
from moorage.schemas.frames import Device, Hello, Join, Joined, Load, Renew, SlotLoad
from moorage.schemas.subjects import Subjects

SUBJECTS = Subjects()
EVERY_S = 2.0
AT_ONCE = 64
ANSWER_S = 30.0
#: between two turns of the clock: what is due is said then
TURN_S = 0.02

_decode_joined: Decoder[Joined | Problem] = Decoder(Joined | Problem)


class LightWorker:
    def __init__(self, number: int, gpus: int) -> None:
        self.id = f"light-{number:05d}"
        self.boot = f"b{number}"
        self.session = ""
        self.n = 0
        self.pool = [
            Device(slot, "nvidia", "NVIDIA H100 80GB HBM3", f"SIM-{number}-{slot}", 81_559) for slot in range(gpus)
        ]

    async def join(self, mux: Mux) -> None:
        hello = Hello(
            self.id,
            self.boot,
            drivers=["noop"],
            cpu_milli=128_000,
            memory_mib=2**20,
            gpu_pool=self.pool,
            simulated=True,
        )
        frame = encode(Join(f"m-{self.id}", self.boot, 1, hello))
        joined = await Asking("the server").ask(mux, SUBJECTS.worker(self.id, "join"), frame, _decode_joined, ANSWER_S)
        self.session = joined.session
        await mux.request(SUBJECTS.worker(self.id, "renew"), self._renewal(), ANSWER_S)

    def _renewal(self) -> bytes:
        self.n += 1
        return encode(Renew(self.session, self.n), json=False)

    def due(self, reply: str) -> list[tuple[str, bytes, str]]:
        """What it says every two seconds; answers go to `reply`, where nobody looks at them."""
        slots = [
            SlotLoad(slot, util_percent=40 + self.n % 9, memory_used_mib=8_000 + self.n)
            for slot in range(len(self.pool))
        ]
        load = Load(self.id, self.boot, self.n, 1, gpu_pool=slots, simulated=True)
        return [
            (SUBJECTS.load(self.id), encode(load), ""),
            (SUBJECTS.worker(self.id, "renew"), self._renewal(), reply),
        ]


async def main() -> None:
    url, _, count, gpus = sys.argv[1:]
    async with await connect(url, "light fleet") as connection:
        workers = [LightWorker(number, int(gpus)) for number in range(int(count))]
        mux = await Mux.open(connection)
        for at in range(0, len(workers), AT_ONCE):
            await asyncio.gather(*(worker.join(mux) for worker in workers[at : at + AT_ONCE]))
        print(len(workers), flush=True)
        gc.freeze()
        await say_for_ever(connection, workers)


async def say_for_ever(connection: Connection, workers: list[LightWorker]) -> None:
    """Each every two seconds, in turn."""
    loop = asyncio.get_running_loop()
    began, said = loop.time(), 0
    reply = f"{connection.inbox_prefix}.light.unheard"
    while True:
        await asyncio.sleep(TURN_S)
        due = int((loop.time() - began) / EVERY_S * len(workers))
        for number in range(said, due):
            await connection.send(workers[number % len(workers)].due(reply))
        said = due


if __name__ == "__main__":
    uvloop.run(main())
