"""An audit asks the workers to look at their devices: a real scheduler, a real agent, simulated readings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.frames import Look, Looked
from moorage.worker.agent.run import start
from moorage.worker.devices.readers.base import DeviceProcess, SlotReading
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.settings import WorkerSettings
from tests.system.live.stack import caller, stack
from tests.waiting import until

_decode_look = Decoder[Look](Look)


async def test_an_audit_tells_of_processes_and_memory_that_no_lease_explains(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        await acme.leader()
        settings = WorkerSettings(tmp_path, "here", unique, simulate="4xH100", drivers=("noop",))
        worker = await start(settings, nats_server.url)
        try:
            inventory = worker.agents[0].inventory
            assert isinstance(inventory, SimulatedInventory)
            await acme.workers_up("here")

            async def sound() -> bool:
                data = (await acme.admin("audit"))["data"]
                assert (data["looked"], data["not_looked"]) == (1, [])
                return not data["drift"]

            await until(sound, what="its first renewal, and no drift")
            uuids = [device.uuid for device in inventory.devices()]
            inventory.set_reading(1, SlotReading(processes=(DeviceProcess(4711, "python", 512),)))
            inventory.keep_memory(2, 900)
            found = (await acme.admin("audit"))["data"]["drift"]
            assert [(row["worker"], row["kind"], row["member"]) for row in found] == [
                ("here", "nvml-foreign", f"{uuids[1]} pid 4711 python"),
                ("here", "nvml-memory", uuids[2]),
            ]
            assert (found[0]["pid"], found[0]["memory_mib"], found[1]["memory_mib"]) == (4711, 512, 900)
            inventory.set_reading(1, None)
            inventory.set_reading(2, None)
            assert await sound()
        finally:
            await worker.stop()


@pytest.mark.slow
async def test_who_does_not_look_in_time_is_named_and_nobody_answers_for_another(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        await acme.leader()
        mute = await made.agent("mute", "1xH100", worker="mute")
        await acme.workers_up("mute")
        mute.stop()
        subjects = acme.subjects
        asked: list[Look] = []

        async def on_look(message: object) -> None:
            look = _decode_look(message.data)  # type: ignore[attr-defined]
            asked.append(look)
            for worker, number in (("other", look.ask), ("mute", look.ask + 1)):  # nobody asked; another look's
                await acme.nc.publish(subjects.worker(worker, "looked"), encode(Looked(worker, number)))
            await acme.nc.publish(subjects.worker("mute", "looked"), b"\xc1 no frame")

        subscription = await acme.nc.subscribe(subjects.look, cb=on_look)
        answers = await asyncio.gather(*(acme.admin("audit") for _ in range(3)))
        assert [(answer["data"]["looked"], answer["data"]["not_looked"]) for answer in answers] == [(0, ["mute"])] * 3
        assert asked
        await subscription.unsubscribe()
        mute.wake()
