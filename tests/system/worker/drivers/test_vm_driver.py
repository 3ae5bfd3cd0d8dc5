"""The driver vm: what it refuses, what it makes of a runner's end, and a guest that comes to no end of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Refused
from moorage.schemas.gpu import Distributed, GpuSpec
from moorage.schemas.job import Request, Resources, Run
from moorage.worker.driver import Assignment, DriverEvent, Living
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.drivers.vm import driver as vm
from moorage.worker.drivers.vm.driver import GUEST_MIB, VmDriver, VmSettings, accelerators
from moorage.worker.drivers.vm.handed_on import HandingInventory
from moorage.worker.drivers.vm.passthrough import lock
from moorage.worker.drivers.vm.runner import UP
from moorage.worker.session.attempt_messages import Ended, NotStarted, Started
from moorage.worker.settings import WorkerSettings
from moorage.worker.supervisor.capped_output import cut_notice, output_path
from moorage.worker.supervisor.client import Supervised, SupervisorUnavailable
from moorage.worker.supervisor.protocol import Ended as ChildEnded
from moorage.worker.supervisor.protocol import Event, Output
from moorage.worker.supervisor.protocol import Started as ChildStarted
from tests.guests import MODULES, kernel, make_disk, make_initramfs, why_no_vm
from tests.nvidia.stub import Stub
from tests.system.worker.drivers.test_passthrough import NO_LIBRARY, Amd, opened
from tests.unit.worker.made_up_pci import AUDIO, GPU
from tests.waiting import until

NO_RULES: Final = Policy({}, {}, {}, None, {})
NAME: Final[AttemptName] = ("acme", "j1", 0, 1, 7)


def driver(
    tmp_path: Path,
    own: VmSettings,
    link: SupervisorLink | None = None,
    hands: HandingInventory | None = None,
    **fields: Any,
) -> VmDriver:
    settings = WorkerSettings(tmp_path / "w", "w1", **fields)
    link = link or SupervisorLink(tmp_path / "s")
    return VmDriver.from_kit(Kit("w1", settings, NO_RULES, link, 1, hands is None, own, inventory=hands))


async def end_supervisor(tmp_path: Path) -> None:
    """One that runs nothing has ended by itself."""
    with contextlib.suppress(SupervisorUnavailable):
        await (await Supervised.connect(tmp_path / "s", spawn_if_absent=False)).shutdown(0.0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(run=Run(driver="vm", argv=["a"], user="bob")), "name no user"),
        (
            Request(run=Run(driver="vm", argv=["a"], image="debian:12")),
            "a file that ends with .qcow2, .raw",
        ),
        (Request(run=Run(driver="vm", argv=["a"], checkpoint_signal="SIGIO")), "a VM gets only these signals: SIGHUP"),
        (Request(run=Run(driver="vm", argv=["a"]), replicas=2, gpu=GpuSpec(scheduling="gang")), "cannot meet"),
        (Request(run=Run(driver="vm", argv=["a"]), gpu=GpuSpec(distributed=Distributed())), "cannot meet"),
        (Request(run=Run(driver="vm", argv=["a"]), gpu=GpuSpec(sharing="time-slice")), "ask for the mode exclusive"),
        (Request(run=Run(driver="vm", argv=["a"]), gpu=GpuSpec(count=2)), "a VM gets one GPU"),
    ],
    ids=["user", "image", "signal", "gang", "distributed", "shared", "two GPUs"],
)
def test_what_no_vm_gives_is_refused_for_good(tmp_path: Path, request_: Request, message: str) -> None:
    with pytest.raises(Refused, match=message) as refused:
        driver(tmp_path, VmSettings()).check(request_)
    assert refused.value.code == "invalid-argument"


async def test_a_worker_offers_gpus_in_vms_where_its_host_can_hand_them_on_else_it_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert driver(tmp_path, VmSettings()).can().gpu_enabled  # simulated
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        host = Amd(tmp_path / "root")
        hands = await opened(host, tmp_path / "vm")
        assert driver(tmp_path, VmSettings(), hands=hands).can().gpu_enabled
        assert not caplog.records
        (host.root / "sys/kernel/iommu_groups").rename(tmp_path / "gone")
        made = driver(tmp_path, VmSettings(), hands=hands)
        assert not made.can().gpu_enabled
        assert caplog.messages == ["worker w1: VMs get no GPUs on this host: this host has no IOMMU, or it is off"]
        with pytest.raises(Refused, match="the driver vm has no GPU support here") as refused:
            made.check_block(Request(run=Run(driver="vm", argv=["a"]), gpu=GpuSpec()))
        assert refused.value.code == "failed-precondition"
        hands.close()


async def test_a_worker_without_a_kernel_does_not_offer_vms(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="the driver vm has no kernel that it can read"):
        await driver(tmp_path, VmSettings()).open()


async def test_a_worker_that_is_to_use_kvm_alone_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    own = VmSettings(kernel=tmp_path / "file", initramfs=tmp_path / "file", qemu="/bin/sh", accelerator="kvm")
    monkeypatch.setattr(vm, "has_kvm", lambda: False)
    with pytest.raises(Refused, match="accelerator is kvm, and this host has no KVM"):
        await driver(tmp_path, own).open()


def test_the_vm_is_as_large_as_the_request_says(tmp_path: Path) -> None:
    made = driver(tmp_path, VmSettings(kernel=Path("k"), initramfs=Path("i"), cpus=3, memory=256 << 20))

    def plan_of(resources: Resources | None) -> str:
        request = Request(run=Run(driver="vm", argv=["a"], env={"TOKEN": "hush"}), resources=resources)
        start = made._start_attempt(Assignment(NAME, request, [], "none"))
        assert "hush" not in " ".join(start.argv)
        assert (start.env["GUEST_TOKEN"], start.env["GUEST_HOME"]) == ("hush", "/work")
        assert "TOKEN" not in start.env
        assert "GUEST_MOORAGE_REPORT" not in start.env, "a path of the host is nowhere in the guest"
        return start.argv[-1]

    assert f'"cpus":3,"memory_mib":{256 + GUEST_MIB}' in plan_of(None)
    assert f'"cpus":2,"memory_mib":{512 + GUEST_MIB}' in plan_of(Resources(cpu_milli=1500, memory_mib=512))


def test_a_disk_image_lies_in_a_folder_that_its_tenant_may_use(tmp_path: Path) -> None:
    for name in ("all/os.qcow2", "acme/own.raw", "other.qcow2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "all/link.qcow2").symlink_to(tmp_path / "other.qcow2")
    (tmp_path / "all/folder.img").mkdir()
    own = VmSettings(
        kernel=Path("k"), initramfs=Path("i"), images=(f"{tmp_path}/all",), images_for={"acme": f"{tmp_path}/acme"}
    )
    made = driver(tmp_path, own)

    def request(image: str) -> Request:
        return Request(run=Run(driver="vm", argv=["a"], image=image))

    def plan_of(tenant: str, image: str) -> str:
        made.check(request(image))
        return made._start_attempt(Assignment((tenant, *NAME[1:]), request(image), [], "none")).argv[-1]

    assert f'"disk":"{tmp_path}/acme/own.raw"' in plan_of("acme", "own.raw")
    assert f'"disk":"{tmp_path}/all/os.qcow2"' in plan_of("bob", f"{tmp_path}/all/os.qcow2")
    with pytest.raises(Refused, match=r"not-permitted: no disk image os\.qcow2 that acme may") as refused:
        plan_of("acme", "os.qcow2")
    assert refused.value.code == "not-permitted"
    for image in ("../other.qcow2", "link.qcow2", "folder.img", "none.qcow2", f"{tmp_path}/other.qcow2"):
        with pytest.raises(Refused, match="this worker has no disk image") as refused:
            made.check(request(image))
        assert refused.value.code == "failed-precondition", "another worker may have it"


def test_kvm_is_tried_only_where_the_processor_has_it(tmp_path: Path) -> None:
    device, cpuinfo = tmp_path / "kvm", tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu vmx sse\n")
    assert accelerators("auto", device, cpuinfo) == ["tcg"]
    device.touch()
    assert accelerators("auto", device, cpuinfo) == ["kvm", "tcg"]
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse\n")
    assert accelerators("auto", device, cpuinfo) == ["tcg"]
    assert accelerators("kvm", device, cpuinfo) == ["kvm"]


async def test_a_job_counts_as_started_once_its_vm_is_up_and_a_runner_without_an_end_is_no_exit(tmp_path: Path) -> None:
    made = driver(tmp_path, VmSettings(kernel=Path("k"), initramfs=Path("i")))
    events: list[DriverEvent] = []
    made.attach(events.append, lambda name, payload: None)

    def told(*said: Event) -> list[DriverEvent]:
        del events[:]
        for each in said:
            made.on_event(each.key, each)
        made.on_events_over()
        return without_peaks(events)

    def start(job: str) -> tuple[AttemptName, str]:
        name: AttemptName = ("acme", job, 0, 1, 7)
        made._start_attempt(Assignment(name, Request(run=Run(driver="vm", argv=["a"])), [], "none"))
        return name, made._key(name)

    def stderr(key: str, line: str) -> Output:
        return Output(key=key, stream="stderr", offset=0, data=line.encode())

    killed: Any = {"reason": "exit", "proof": "walk", "signal": 9}
    name, key = start("up")
    begun = ChildStarted(key=key, pid=1 << 22, started_boottime_s=1.0)
    assert told(begun, stderr(key, "moorage: with kvm: no sign\n")) == []
    assert told(stderr(key, f"{UP} (tcg)\n")) == [Started([name])]
    assert told(begun, ChildEnded(key=key, **killed)) == [Ended([(name, -9, "lost")])]

    name, key = start("never-up")
    assert told(stderr(key, "moorage: with kvm: no sign\nmoorage: the VM did not come up: panic\n")) == []
    [refused] = told(ChildEnded(key=key, **killed))
    assert refused == NotStarted([(name, "start-failed: boot: the VM did not come up: panic")])

    name, key = start("asked")
    assert told(ChildEnded(key=key, **killed | {"reason": "end", "signal": 15})) == [Ended([(name, -15, "end")])]
    assert made._booting == {}


@pytest.mark.parametrize(
    ("said", "booting", "reason"),
    [
        ("moorage: with kvm: no sign\n", "moorage: with kvm: no sign", "start-failed"),
        (f"moorage: with kvm: no sign\n{UP} (tcg)\nwords", None, "supervisor-died"),
        (cut_notice("stderr", 0).decode(), None, "supervisor-died"),  # no output is kept here: it may be up
    ],
    ids=["not-up", "up", "unknown"],
)
def test_an_agent_that_takes_a_vm_over_knows_whether_it_was_up(
    tmp_path: Path, said: str, booting: str | None, reason: str
) -> None:
    made = driver(tmp_path, VmSettings())
    path = output_path(tmp_path / "s", made._key(NAME), "stderr")
    path.parent.mkdir(parents=True)
    path.write_text(said)
    made._taken_over(NAME)
    assert made._booting.get(NAME) == booting
    is_up = made._starting_while_it_boots(Living(NAME, "running")).phase == "running"
    assert is_up == (booting is None)
    later = driver(tmp_path, VmSettings())  # it ended while there was no agent
    ended: Any = {"reason": "exit", "proof": "walk", "signal": 9}
    assert later._reported_end(NAME, ChildEnded(key=made._key(NAME), **ended)).reason == reason
    path.unlink()  # nothing is kept of it any more: it may have run
    assert driver(tmp_path, VmSettings())._reported_end(NAME, ChildEnded(key="", **ended)).reason == "supervisor-died"


def test_processes_and_vms_of_a_worker_keep_their_folders_apart(tmp_path: Path) -> None:
    """A driver takes folders of attempts that it does not know for those of attempts that are over."""
    made = driver(tmp_path, VmSettings())
    assert made._folders.root.name == "w1@vm"


#: in the place of QEMU: comes up once the file `go` is there, and runs on
COMES_UP: Final = """#!{python}
import pathlib, re, socket, sys, time
folder = pathlib.Path({folder!r})
job = socket.socket(fileno=int(re.search("id=job,fd=([0-9]+)", " ".join(sys.argv))[1]))
(folder / "begun").write_text(" ".join(sys.argv))
while not (folder / "go").exists():
    time.sleep(0.05)
job.sendall(b"up\\n")
time.sleep(600)
"""


def comes_up(folder: Path) -> VmSettings:
    qemu = folder / "qemu"
    qemu.write_text(COMES_UP.format(python=sys.executable, folder=str(folder)))
    qemu.chmod(0o755)
    (folder / "image").touch()
    return VmSettings(kernel=folder / "image", initramfs=folder / "image", qemu=str(qemu), accelerator="tcg")


@pytest.mark.slow
async def test_a_vm_that_boots_when_its_agent_dies_is_starting_for_the_next_one(tmp_path: Path) -> None:
    own = comes_up(tmp_path)
    first = driver(tmp_path, own, SupervisorLink(tmp_path / "s"), stream_output=False)
    first.attach(lambda event: None, lambda name, payload: None)
    await first.open()
    first.start([Assignment(NAME, Request(run=Run(driver="vm", argv=["a"])), [], "none")])
    await until((tmp_path / "begun").exists, deadline_s=60, what="a runner that starts QEMU")
    await first.close()
    second = driver(tmp_path, own, SupervisorLink(tmp_path / "s"), stream_output=False)
    events: list[DriverEvent] = []
    second.attach(events.append, lambda name, payload: None)
    try:
        assert await second.open() == [Living(NAME, "starting")]
        (tmp_path / "go").touch()
        await until(lambda: events == [Started([NAME])], deadline_s=60, what=f"a start in {events}")
    finally:
        await second.close()
        await end_supervisor(tmp_path)


@pytest.mark.slow
async def test_a_gpu_is_the_vms_until_nothing_of_it_is_left_and_then_the_hosts_again(tmp_path: Path) -> None:
    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        host = Amd(tmp_path / "root")
        hands = await opened(host, tmp_path / "vm")
        made = driver(tmp_path, comes_up(tmp_path), hands=hands, stream_output=False)
        events: list[DriverEvent] = []
        made.attach(events.append, lambda name, payload: None)
        run = Request(run=Run(driver="vm", argv=["a"]), gpu=GpuSpec())
        (tmp_path / "go").touch()
        try:
            await made.open()
            made.start([Assignment(NAME, run, hands.devices()[:1], "exclusive")])
            await until(lambda: events == [Started([NAME])], deadline_s=60, what=f"a start in {events}")
            assert host.drivers() == ("vfio-pci", "vfio-pci")
            words = (tmp_path / "begun").read_text()
            assert f"vfio-pci,host={GPU},bus=gpu1" in words
            assert f"vfio-pci,host={AUDIO},bus=gpu2" in words
            assert lock(hands.lock_of(GPU)) is None
            assert await hands.take_back() == []
            assert host.drivers() == ("vfio-pci", "vfio-pci")
            made.end(NAME, 0.0, "fence")
            await until(lambda: len(events) == 2, deadline_s=60, what=f"an end in {events}")
            await until(lambda: not hands.away, deadline_s=60, what="a GPU that is given back")
            assert host.drivers() == ("amdgpu", "snd_hda_intel")

            host.device("0000:19:00.0", "0x010802", "nvme")
            made.start([Assignment(NAME, run, hands.devices()[:1], "exclusive")])
            await until(lambda: len(events) == 3, deadline_s=60, what=f"a refusal in {events}")
            why = "start-failed: passthrough: 0000:19:00.0 is in the IOMMU group 7 of 0000:17:00.0, and nvme uses it"
            assert events[2] == NotStarted([(NAME, why)])
        finally:
            await made.close()
            hands.close()
            await end_supervisor(tmp_path)


async def test_a_gpu_whose_start_is_withdrawn_while_it_is_bound_is_given_back(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()
    bound: list[tuple[str, str]] = []

    class Slow(Amd):
        def write(self, path: Path, text: str) -> None:
            begun.set()
            go.wait(60)
            super().write(path, text)

        def bind(self, address: str, driver: str) -> None:
            super().bind(address, driver)
            bound.append((address, driver))

    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        host = Slow(tmp_path / "root")
        hands = await opened(host, tmp_path / "vm")
        made = driver(tmp_path, comes_up(tmp_path), hands=hands)
        events: list[DriverEvent] = []
        made.attach(events.append, lambda name, payload: None)
        run = Request(run=Run(driver="vm", argv=["a"]), gpu=GpuSpec())
        made.start([Assignment(NAME, run, hands.devices()[:1], "exclusive")])
        await until(begun.is_set, deadline_s=60, what="a GPU that is being bound")
        made.end(NAME, 0.0, "asked")
        assert events == [Ended([(NAME, -15, "end")])]
        go.set()
        await until(lambda: (AUDIO, "vfio-pci") in bound, deadline_s=60, what="a GPU that is bound")
        await until(lambda: host.drivers() == ("amdgpu", "snd_hda_intel"), deadline_s=60, what="it is given back")
        await until(lambda: not hands.away, deadline_s=60, what="the devices are open again")
        hands.close()


# --------------------------------------------------------------------------------------------------- with real VMs


def without_peaks(events: list[DriverEvent]) -> list[DriverEvent]:
    """The events without what the VM's own process had of memory and CPU, which no run has alike."""
    return [Ended(each.items, each.checkpoints) if isinstance(each, Ended) else each for each in events]


async def _reported(
    tmp_path: Path,
    own: VmSettings,
    argv: list[str],
    wanted: Callable[[list[DriverEvent]], object],
    image: str | None = None,
) -> list[DriverEvent]:
    """What the driver reports of one job, until that is there."""
    link = SupervisorLink(tmp_path / "s")
    made = driver(tmp_path, own, link, stream_output=False)
    events: list[DriverEvent] = []
    said: list[bytes] = []
    made.attach(events.append, lambda name, payload: said.append(payload))
    try:
        await made.open()
        made.start([Assignment(NAME, Request(run=Run(driver="vm", argv=argv, image=image)), [], "none")])
        await until(lambda: wanted(events), deadline_s=300, what=f"more than {events}")
        assert not any(b"moorage: " in each for each in said), "output is not to be streamed"
        return without_peaks(events)
    finally:
        await made.close()
        await end_supervisor(tmp_path)


def _has(kind: type) -> Callable[[list[DriverEvent]], object]:
    return lambda events: any(isinstance(event, kind) for event in events)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_vm()), reason=why_no_vm())
async def test_a_disk_image_is_the_root_of_the_command_and_stays_starting_while_it_boots(tmp_path: Path) -> None:
    modules = (*MODULES, "block/virtio_blk")
    image = make_disk(tmp_path)
    before = image.read_bytes()
    own = VmSettings(
        kernel=kernel(), initramfs=make_initramfs(tmp_path, modules=modules), boot=250.0, images=(str(tmp_path),)
    )
    script = "cat /on-disk && test ! -e /etc/moorage && echo mine > /on-disk && sync && cd /work && exit 7"
    events = await _reported(tmp_path, own, ["sh", "-c", script], _has(Ended), image=image.name)
    assert events == [Started([NAME]), Ended([(NAME, 7, "exit")])]
    assert output_path(tmp_path / "s", driver(tmp_path, own)._key(NAME), "stdout").read_text() == "of the image\n"
    assert image.read_bytes() == before


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(why_no_vm()), reason=why_no_vm())
async def test_a_guest_that_is_switched_off_is_a_loss_and_has_no_code(tmp_path: Path) -> None:
    own = VmSettings(kernel=kernel(), initramfs=make_initramfs(tmp_path), boot=250.0)
    events = await _reported(tmp_path, own, ["poweroff", "-f"], _has(Ended))
    assert events == [Started([NAME]), Ended([(NAME, -9, "lost")])]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_vm()), reason=why_no_vm())
async def test_a_guest_that_does_not_come_up_sends_the_job_elsewhere_with_its_last_words(tmp_path: Path) -> None:
    image = make_initramfs(tmp_path, boot="echo no ports here > /dev/console; exec poweroff -f\n")
    own = VmSettings(kernel=kernel(), initramfs=image, boot=250.0)
    (event,) = await _reported(tmp_path, own, ["true"], _has(NotStarted))
    assert isinstance(event, NotStarted)
    [(name, why)] = event.items
    assert name == NAME
    assert why.startswith("start-failed: boot: the VM did not come up: QEMU ended: ")


async def test_gpus_are_given_back_once_there_is_a_descriptor_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.worker.drivers.vm.driver.GIVE_BACK_S", 0.0)
    refusals, asked = [OSError(errno.EMFILE, "Too many open files")], asyncio.Event()

    async def take_back(spared: Collection[str]) -> list[str]:
        if refusals:
            raise refusals.pop()
        asked.set()
        return []

    with Stub(tmp_path / "stub", extra=(NO_LIBRARY,)).load():
        hands = await opened(Amd(tmp_path / "root"), tmp_path / "vm")
    monkeypatch.setattr(hands, "away", {"0000:03:00.0"})
    monkeypatch.setattr(hands, "take_back", take_back)
    driver(tmp_path, VmSettings(), hands=hands)._give_back()
    async with asyncio.timeout(30):
        await asked.wait()
