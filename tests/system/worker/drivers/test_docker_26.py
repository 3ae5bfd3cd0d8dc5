"""The driver docker on Debian 13's engine, which has CDI: the GPUs of the lease and no others, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from moorage.schemas.frames import Device
from moorage.worker.drivers.container.start import Starter
from moorage.worker.session.attempt_messages import Ended, NotStarted, Started, StartFailed
from moorage.worker.sharing.limiter import limits
from tests.engines import DockerEngine, engine, path_26, why_no_docker_26
from tests.nvidia.limited import built, put_for_containers, uuid_of
from tests.registries import Registry, large_layer
from tests.system.worker.drivers.container_rig import state_of
from tests.system.worker.drivers.test_docker_driver import IMAGE, Rig, no_containers, settings
from tests.system.worker.drivers.test_podman_driver import STALE, stale_cdi_of
from tests.system.worker.limited_containers import limited_containers

KIND: Final = "moorage.test/gpu"
#: of the engine's disk, and of a layer that does not fit there
DISK_BYTES: Final = 48 << 20
LAYER_BYTES: Final = 2 * DISK_BYTES


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cdi")


@pytest.fixture(scope="module")
def docker(specs: Path) -> Iterator[DockerEngine]:
    if why := why_no_docker_26():
        pytest.skip(why)
    (specs / "gpu.json").write_bytes(spec_of(KIND, "0", "1", "2"))
    config = {"features": {"cdi": True}, "cdi-spec-dirs": [str(specs)]}
    with engine(config=config, path=path_26(), disk_bytes=DISK_BYTES) as made:
        made.make_image(IMAGE)
        yield made


def spec_of(kind: str, *names: str) -> bytes:
    """A spec whose devices are files in /dev of their own, each of them /dev/null."""
    nodes = {name: [{"path": f"/dev/moorage-test-{name}", "hostPath": "/dev/null"}] for name in names}
    edits = [{"name": name, "containerEdits": {"deviceNodes": node}} for name, node in nodes.items()]
    return msgspec.json.encode({"cdiVersion": "0.5.0", "kind": kind, "devices": edits})


def cards(*names: str, kind: str = KIND) -> list[Device]:
    return [Device(at, "nvidia", "made up", f"GPU-{name}", cdi=[f"{kind}={name}"]) for at, name in enumerate(names)]


@pytest.mark.slow
async def test_a_job_gets_the_devices_of_its_lease_by_cdi_and_a_broken_spec_sends_it_elsewhere(
    docker: DockerEngine, specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = settings(docker)
    async with state_of(tmp_path) as state:
        async with Rig(state, own, devices=cards("0", "2")) as rig:
            shows = "ls /dev/moorage-test-*; echo $NVIDIA_VISIBLE_DEVICES $CUDA_VISIBLE_DEVICES"
            name = rig.start("j1", "sh", "-c", shows, env={"NVIDIA_VISIBLE_DEVICES": "all"})
            assert await rig.reported(Ended, name) == (name, 0, "exit")
            assert await rig.output(name) == "/dev/moorage-test-0\n/dev/moorage-test-2\nvoid 0,1\n"
            with monkeypatch.context() as changed:  # the driver counts on a node that no spec has
                changed.setattr(Starter, "_nodes_due", lambda *_: ["/dev/moorage-test-0", "/dev/moorage-test-9"])
                name = rig.start("unseen", "sleep", "600")
                why = (await rig.reported(NotStarted, name))[1]
                assert "the engine has not given /dev/moorage-test-9 to the container" in why
                assert rig.told(Started, name) is None
        async with Rig(state, own, devices=cards("7")) as rig:
            name = rig.start("j2", "true")
            told = (await rig.reported(NotStarted, name))[1]
            assert "has no CDI spec with these GPUs, and no hook of NVIDIA's" in told, "it was asked for by the hook"
        broken = specs / "broken.json"
        broken.write_text('{"cdiVersion": "0.5.0", "kind":')
        async with Rig(state, own, devices=cards("0", kind="moorage.broken/gpu")) as rig:
            name = rig.start("j3", "true")
            assert "no CDI spec" in (await rig.reported(NotStarted, name))[1]
            broken.unlink()
            docker.kill()
            rig.devices = cards("0")
            name = rig.start("j4", "true")
            assert "engine" in (await rig.reported(NotStarted, name))[1]
            docker.start()
            rig.devices = cards("1")
            name = rig.start("j5", "sh", "-c", "ls /dev/moorage-test-*")
            assert await rig.reported(Ended, name) == (name, 0, "exit"), "the next engine has them"
            assert await rig.output(name) == "/dev/moorage-test-1\n"
            await no_containers(docker)


@pytest.mark.slow
async def test_a_spec_that_is_out_of_date_is_the_hosts_fault_and_a_missing_program_the_jobs(
    docker: DockerEngine, specs: Path, tmp_path: Path
) -> None:
    kind = "moorage.stale/gpu"
    (specs / "stale.json").write_bytes(stale_cdi_of(kind, tmp_path))
    async with state_of(tmp_path) as state:
        for name, said in STALE.items():
            async with Rig(state, settings(docker), devices=cards(name, kind=kind)) as rig:
                assert said in (await rig.reported(NotStarted, rig.start(name, "true")))[1]
        async with Rig(state, settings(docker), devices=cards("good", kind=kind)) as rig:
            started = rig.start("good", "moorage-test-no-program")
            assert (await rig.reported(StartFailed, started))[1] == 127
        await no_containers(docker)


@pytest.mark.slow
async def test_a_spec_that_the_engine_did_not_see_come_is_the_hosts_fault_with_what_to_do(
    docker: DockerEngine, specs: Path, tmp_path: Path
) -> None:
    kind = "moorage.moved/gpu"
    written = tmp_path / "moved.json"
    written.write_bytes(spec_of(kind, "0"))
    async with state_of(tmp_path) as state:
        async with Rig(state, settings(docker), devices=cards("0", kind=kind)) as rig:
            written.rename(specs / "moved.json")  # from another folder of its disk
            why = (await rig.reported(NotStarted, rig.start("unseen", "true")))[1]
            assert f"unresolvable CDI devices {kind}=0: a spec on that host has them" in why
            (specs / "moved.json").write_bytes(spec_of(kind, "0"))
            name = rig.start("seen", "ls", "/dev/moorage-test-0")
            assert await rig.reported(Ended, name) == (name, 0, "exit")
        await no_containers(docker)


@pytest.mark.slow
async def test_a_container_with_a_share_is_held_to_it_by_a_segment_of_its_own(
    docker: DockerEngine, specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "moorage.limited/gpu"  # the engine reads its specs anew when one is missing
    (specs / "limited.json").write_bytes(spec_of(kind, "0"))
    device = Device(0, "nvidia", "made up", uuid_of(0), cdi=[f"{kind}=0"])
    monkeypatch.setattr(limits, "LIBRARY", built() / "limiter.bin")
    put_for_containers(tmp_path / "built")
    own = settings(docker, mounts=(f"{tmp_path}/built:/built:ro",))
    async with (
        state_of(tmp_path) as state,
        Rig(state, own, devices=[device], limiter=True, limiter_context=0) as rig,
    ):
        await limited_containers(rig, rig.driver.limits)
        await no_containers(docker)


@pytest.mark.slow
async def test_a_pull_that_fails_says_whose_fault_it_is(docker: DockerEngine, tmp_path: Path) -> None:
    async with state_of(tmp_path) as state, Rig(state, settings(docker, pull="missing")) as rig:
        with Registry.serving() as registry:
            absent = rig.start("absent", "true", image=f"{registry.address}/box:2")
            assert "cannot be pulled" in (await rig.reported(NotStarted, absent))[1], "another host may have it"
            registry.comes.clear()
            image = f"{registry.address}/box:1"
            name = rig.start("restarts", "sh", "-c", "exit 3", image=image)
            assert await asyncio.to_thread(registry.asked.wait, 60)
            docker.kill()
            assert "engine" in (await rig.reported(NotStarted, name))[1], "killed in the middle of a pull"
            registry.comes.set()
            docker.start()
            again = rig.start("again", "sh", "-c", "exit 3", image=image)
            assert await rig.reported(Ended, again) == (again, 3, "exit")
        with Registry.serving(large_layer(LAYER_BYTES)) as registry:
            name = rig.start("full", "true", image=f"{registry.address}/box:1")
            told = (await rig.reported(NotStarted, name))[1]
            assert "no space left on device" in told
            assert rig.told(Started, name) is None
        again = rig.start("here", "sh", "-c", "exit 4")
        assert await rig.reported(Ended, again) == (again, 4, "exit"), "what the disk had is there"
        await no_containers(docker)
