"""CDI specs: read as engines read them, and resolved; and devices that are known by them alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.frames import Device
from moorage.worker.devices.readers import cdi
from moorage.worker.devices.readers.cdi import Registry, folders, read_registry
from moorage.worker.devices.readers.cdi_devices import cdi_names
from moorage.worker.devices.readers.cdi_spec import CdiError
from moorage.worker.devices.readers.device_nodes import device_nodes
from moorage.worker.devices.readers.machine import CombinedInventory, open_machine
from tests import cdi_specs
from tests.nvidia.stub import Board, Stub

GPU = "nvidia.com/gpu"
YAML = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
  deviceNodes: [{path: /dev/nvidiactl}]
devices:
  - name: "0"
    containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
  - name: "1"
    containerEdits: {deviceNodes: [{path: /dev/nvidia1}]}
"""


def node(path: str) -> dict[str, Any]:
    return {"deviceNodes": [{"path": path}]}


def spec(devices: dict[str, dict[str, Any]], kind: str = GPU, version: str = "0.5.0", **more: Any) -> bytes:
    listed = [{"name": name, "containerEdits": edits} for name, edits in devices.items()]
    return msgspec.json.encode({"cdiVersion": version, "kind": kind, "devices": listed, **more})


def put(folder: Path, name: str, text: bytes | str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(*where: Path) -> tuple[list[str], list[str]]:
    found = read_registry(where)
    return sorted(found.devices), list(found.faults)


def test_the_folders_are_those_of_the_document_and_those_of_the_variable(tmp_path: Path) -> None:
    env = {"CDI_SPEC_DIRS": f"/opt/a{os.pathsep}{os.pathsep}/opt/b"}
    assert folders(tmp_path, env) == [tmp_path / "etc/cdi", tmp_path / "var/run/cdi", Path("/opt/a"), Path("/opt/b")]
    assert read_registry(folders(tmp_path, {})) == Registry({}, ())


def test_json_and_yaml_that_lie_in_the_folder_itself(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", YAML)
    put(tmp_path, "b.yml", YAML.replace("nvidia.com", "yml.io"))
    put(tmp_path, "b.yaml", YAML.replace("nvidia.com", "site.io"))
    put(tmp_path, "c.json", spec({"0": node("/dev/kfd")}, "amd.com/gpu"))
    put(tmp_path, "d.txt", YAML.replace("nvidia.com", "text.io"))
    put(tmp_path / "below.json", "e.json", spec({"0": node("/dev/x")}, "below.io/gpu"))
    names, faults = read(tmp_path)
    assert names == [
        "amd.com/gpu=0", "nvidia.com/gpu=0", "nvidia.com/gpu=1", "site.io/gpu=0", "site.io/gpu=1",
    ]  # fmt: skip
    assert faults == []


def test_a_later_folder_goes_before_and_two_files_of_one_folder_spoil_the_device(tmp_path: Path) -> None:
    etc, run = tmp_path / "etc", tmp_path / "run"
    put(etc, "a.json", spec({"0": node("/dev/etc0"), "1": node("/dev/etc1"), "2": node("/dev/etc2")}))
    put(run, "a.json", spec({"0": node("/dev/run0"), "1": node("/dev/run1")}))
    found = read_registry([etc, run])
    assert [found.own_nodes(f"{GPU}={name}") for name in "012"] == [{"/dev/run0"}, {"/dev/run1"}, {"/dev/etc2"}]
    put(run, "b.json", spec({"1": node("/dev/other"), "3": node("/dev/run3")}))
    names, faults = read(etc, run)
    assert names == [f"{GPU}={name}" for name in "023"]
    assert faults == [f"{run}: two files have the device {GPU}=1, so it is in none"]


NAMES_TWICE = b'{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[%s,%s]}' % (
    (b'{"name":"0","containerEdits":{"env":["A=1"]}}',) * 2
)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("x.json", b"{", "no YAML"),
        ("x.json", b'{"kind":' + b"[" * 100_000, "nested too deep"),
        ("x.yaml", "[" * 20_000, "nested too deep"),
        ("x.json", b"", "it is no CDI spec"),
        ("x.json", b"\xff\xfe", "it is no CDI spec"),
        ("x.yaml", "a: [", "no YAML"),
        ("x.yaml", "a: *x", "no YAML"),
        ("x.yaml", "a: &x [*x]", "no YAML"),
        ("x.yaml", cdi_specs.LAUGHS, "more than 16 aliases"),
        ("x.yaml", "? [a]\n: 1", "no YAML"),
        ("x.yaml", "!!python/object/apply:os.system [echo]", "it is no CDI spec"),
        ("x.json", spec({"0": node("/dev/x")}, "nvidia.com"), "is no vendor and class, such as nvidia.com/gpu"),
        ("x.json", spec({}), "it has no devices"),
        ("x.json", NAMES_TWICE, "the device 0 is there twice"),
        ("x.json", b" " * (cdi.FILE_BYTES_MAX + 1), "more than"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_told_and_leaves_the_others_alone(
    tmp_path: Path, name: str, text: bytes | str, why: str
) -> None:
    put(tmp_path, name, text)
    put(tmp_path, "good.json", spec({"GPU-1:0": node("/dev/nvidia0")}))
    names, (fault,) = read(tmp_path)
    assert names == [f"{GPU}=GPU-1:0"]
    assert fault.startswith(f"{tmp_path}/{name}: ")
    assert why in fault
    assert len(fault) <= cdi.FAULT_CHARS_MAX
    assert "\n" not in fault


def test_what_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    put(tmp_path, "file", b"")
    names, faults = read(tmp_path, tmp_path / "file")
    assert names == []
    assert [fault.partition(": ")[2] for fault in faults] == [
        "No such file or directory", "it is not a plain file", "Not a directory",
    ]  # fmt: skip
    monkeypatch.setattr(cdi, "FILES_MAX", 1)
    assert f"{tmp_path}: only the first 1 of 2 files are read" in read(tmp_path)[1]


def test_devices_beyond_the_limit_are_told_and_replace_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etc, run = tmp_path / "etc", tmp_path / "run"
    put(etc, "a.json", spec({"0": node("/dev/etc0"), "1": node("/dev/etc1")}))
    put(run, "a.json", spec({"1": node("/dev/run1"), "2": node("/dev/run2")}))
    monkeypatch.setattr(cdi, "DEVICES_MAX", 2)
    found = read_registry([etc, run])
    assert [found.own_nodes(f"{GPU}={name}") for name in "01"] == [{"/dev/etc0"}, {"/dev/run1"}]
    assert found.faults == ("only the first 2 devices are used; 1 more are left out",)


def test_a_file_that_is_written_while_it_is_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, "x.json", spec({"0": node("/dev/nvidia0")}))
    real, looks = os.fstat, []

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        looks.append(found)
        if len(looks) == 1:
            path.write_bytes(path.read_bytes() + b" ")
        return found

    monkeypatch.setattr(os, "fstat", fstat)
    names, faults = read(tmp_path)
    assert names == []
    assert "changed while it was read" in faults[0]


def test_devices_are_resolved_with_the_nodes_of_their_spec_once(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", YAML)
    put(tmp_path, "b.json", spec({"0": {"env": ["B=1"]}}, "site.io/net", containerEdits=node("/dev/net")))
    found = read_registry([tmp_path])
    nodes = found.resolve([f"{GPU}=1", "site.io/net=0", f"{GPU}=0", f"{GPU}=1"])
    assert [each.path for each in nodes] == ["/dev/nvidiactl", "/dev/net", "/dev/nvidia1", "/dev/nvidia0"]
    with pytest.raises(CdiError, match=f"unresolvable CDI devices {GPU}=7, x"):
        found.resolve([f"{GPU}=7", f"{GPU}=0", "x"])


def test_a_file_of_a_newer_version_names_its_devices_as_others_do(tmp_path: Path) -> None:
    newer = {"0": node("/dev/nvidia0") | {"ofLater": [1], "hooks": [{"hookName": "ofLater", "path": "x"}]}}
    put(tmp_path, "a.json", spec(newer, version="9.9.0", annotations={"a": "b"}, ofLater={}))
    found = read_registry([tmp_path])
    assert found.faults == ()
    assert found.own_nodes(f"{GPU}=0") == {"/dev/nvidia0"}


# ------------------------------------------------------------------------------------------------------ its names


def gpu(index: int, uuid: str, vendor: str = "nvidia") -> Device:
    return Device(index, vendor, "GPU", uuid)


def test_a_device_is_named_by_its_uuid_else_by_its_node_and_never_by_its_index(tmp_path: Path) -> None:
    put(tmp_path, "a.json", spec({
        "0": node("/dev/nvidia0"), "1": node("/dev/nvidia1"), "2": {"env": ["NO=node"]},
        "GPU-b": {"deviceNodes": [{"path": "/dev/nvidia1"}, {"path": "/dev/dri/renderD128"}]},
        "all": {"deviceNodes": [{"path": "/dev/nvidia0"}, {"path": "/dev/nvidia1"}]},
    }))  # fmt: skip
    found = read_registry([tmp_path])
    devices = [gpu(0, "GPU-b"), gpu(1, "GPU-a"), gpu(2, "GPU-c")]
    nodes = [("/dev/nvidia1",), ("/dev/nvidia0",), ("/dev/nvidia2",)]  # NVML's minor numbers are no indices
    assert cdi_names(devices, nodes, found) == [[f"{GPU}=GPU-b", f"{GPU}=1"], [f"{GPU}=0"], []]
    moved = [gpu(0, "GPU-b"), gpu(1, "GPU-a")]  # the cards have changed places since the spec was written
    assert cdi_names(moved, [("/dev/nvidia0",), ("/dev/nvidia1",)], found) == [[f"{GPU}=0"], [f"{GPU}=1"]]
    assert cdi_names([gpu(0, "GPU-b")], [()], found) == [[f"{GPU}=GPU-b"]]
    assert cdi_names([gpu(0, "x", "unknown")], [("/dev/nvidia0",)], found) == [[]]


async def test_a_worker_tells_the_cdi_names_of_its_devices(tmp_path: Path) -> None:
    put(tmp_path / "etc/cdi", "a.json", spec({"GPU-a": node("/dev/nvidia1"), "0": node("/dev/nvidia0")}))
    put(tmp_path / "etc/cdi", "broken.json", b"{")
    boards = Board("GPU-a", more={"minor": 1}), Board("GPU-b", pci="00000000:2A:00.0", more={"minor": 0})
    with Stub(tmp_path / "stub", *boards).load():
        inventory = await open_machine("f00d" * 8, root=tmp_path)
    assert [device.cdi for device in inventory.devices()] == [[f"{GPU}=GPU-a"], [f"{GPU}=0"]]
    assert [inventory.nodes(slot) for slot in range(2)] == [("/dev/nvidia1",), ("/dev/nvidia0",)]
    inventory.close()


# ---------------------------------------------------------------------------------------------------- without NVML


async def open_without_nvml(root: Path) -> CombinedInventory:
    with Stub(root / "stub", extra=("fail call=nvmlInitWithFlags code=12",)).load():  # no library
        return await open_machine("f00d" * 8, root=root)


async def test_without_nvml_the_specs_tell_the_devices_whose_files_are_there(tmp_path: Path) -> None:
    put(tmp_path / "etc/cdi", "a.json", spec({
        "0": node("/dev/nvidia0"), "1": node("/dev/nvidia1"), "GPU-b": node("/dev/nvidia1"), "7": node("/dev/nvidia7"),
        "1:0": node("/dev/nvidia1"), "all": {"deviceNodes": [{"path": "/dev/nvidia0"}, {"path": "/dev/nvidia1"}]},
    }))  # fmt: skip
    for number in (0, 1):
        put(tmp_path / "dev", f"nvidia{number}", b"")
    (tmp_path / "proc").mkdir()
    inventory = await open_without_nvml(tmp_path)
    first, second = inventory.devices()
    assert (first.index, first.uuid, first.cdi) == (0, "CDI-f00df00df00d-0", [f"{GPU}=0"])
    assert (second.index, second.uuid, second.cdi) == (1, "GPU-b", [f"{GPU}=GPU-b", f"{GPU}=1"])
    assert [reading.health for reading in await inventory.sample()] == ["ok", "ok"]
    inventory.close()
    with Stub(tmp_path / "none").load():
        there = await open_machine("f00d" * 8, root=tmp_path)
    assert there.devices() == [], "a driver that lists no device has none"
    there.close()


async def test_without_nvml_a_device_is_free_when_no_process_has_its_file_open(tmp_path: Path) -> None:
    put(tmp_path / "etc/cdi", "a.json", spec({"0": node("/dev/nvidia0")}))
    put(tmp_path / "dev", "nvidia0", b"")
    fds = tmp_path / "proc/77/fd"
    fds.mkdir(parents=True)
    put(tmp_path / "proc/77", "comm", "python\n")
    inventory = await open_without_nvml(tmp_path)
    assert await inventory.memory_is_free(0)
    (fds / "3").symlink_to("/dev/nvidia0")
    assert not await inventory.memory_is_free(0)
    [reading] = await inventory.sample()
    assert [(each.pid, each.name) for each in reading.processes] == [(77, "python")]
    (fds / "3").unlink()
    assert await inventory.memory_is_free(0)
    assert inventory.memory_baseline_mib(0) == 0
    with pytest.raises(IndexError):
        inventory.nodes(1)


async def test_on_wsl2_all_is_the_one_device(tmp_path: Path) -> None:
    put(tmp_path / "etc/cdi", "a.json", spec({"all": node("/dev/dxg")}))
    (tmp_path / "proc").mkdir()
    inventory = await open_without_nvml(tmp_path)
    assert inventory.devices() == []
    put(tmp_path / "dev", "dxg", b"")
    inventory = await open_without_nvml(tmp_path)
    assert [(each.uuid, each.cdi) for each in inventory.devices()] == [("CDI-f00df00df00d-all", [f"{GPU}=all"])]


# ------------------------------------------------------------------------------------------------------ its files


@pytest.mark.parametrize(
    ("vendor", "own", "there", "warned"),
    [
        ("nvidia", ["/dev/nvidia3"], ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3"], 1),
        ("amd", ["/dev/dri/renderD128", "/dev/dri/card0"], ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/card0"], 0),
        ("intel", ["/dev/dri/renderD128", "/dev/dri/card0"], ["/dev/dri/renderD128", "/dev/dri/card0"], 0),
        ("unknown", ["/dev/dri/renderD128", "/dev/dri/card0"], ["/dev/dri/renderD128"], 1),
        ("nvidia", [], ["/dev/nvidiactl", "/dev/nvidia-uvm"], 2),
    ],
)
def test_the_device_nodes_of_each_vendor(
    tmp_path: Path, vendor: str, own: list[str], there: list[str], warned: int
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia3", "kfd", "dri/renderD128", "dri/card0"):
        put((tmp_path / "dev" / name).parent, (tmp_path / "dev" / name).name, b"")
    found, warnings = device_nodes(vendor, own, tmp_path)
    assert found == there
    assert len(warnings) == warned, warnings
