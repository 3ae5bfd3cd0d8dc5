"""What a job finds: the variables of its GPUs, and its gang."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.schemas.frames import Device
from moorage.schemas.gpu import Distributed, GpuSpec, Share
from moorage.schemas.reserved_variables import GANG_DEFAULTS, MPS_DIRECTORIES, OF_GANGS, RESERVED, warnings_of
from moorage.system.device_environment import (
    JobEnvironment,
    SharingUnavailable,
    apart_from_mps,
    apply_tf_paths,
    child_environment,
)
from moorage.worker.attempt.environment import Gang, gpu_environment, lay_over, process_environment
from moorage.worker.devices.readers.drm import open_drm
from tests.unit.worker.made_up_sys import MadeUpMachine

ATTEMPT = {"tenant": "vision", "job": "train-42", "replica": 2, "attempt": 1, "fence": 771, "worker": "node-7"}
OF_MEMBER = {
    "MOORAGE_TENANT": "vision",
    "MOORAGE_JOB": "train-42",
    "MOORAGE_REPLICA": "2",
    "MOORAGE_INDEX": "2",
    "MOORAGE_ATTEMPT": "1",
    "MOORAGE_FENCE": "771",
    "MOORAGE_WORKER": "node-7",
}


def device(vendor: str, index: int, uuid: str = "") -> Device:
    return Device(index, vendor, f"{vendor} card", uuid or f"GPU-{vendor}-{index}")


def environment(*devices: Device, **more: object) -> JobEnvironment:
    return gpu_environment(devices, **ATTEMPT, **more)  # type: ignore[arg-type]


BY_VENDOR = {
    "nvidia": (
        [device("nvidia", 5), device("nvidia", 0)],
        {
            "CUDA_VISIBLE_DEVICES": "5,0",
            "NVIDIA_VISIBLE_DEVICES": "GPU-nvidia-5,GPU-nvidia-0",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "MOORAGE_GPU_UUIDS": "GPU-nvidia-5,GPU-nvidia-0",
            "MOORAGE_GPU_INDICES": "5,0",
        },
    ),
    "amd with and without a uuid": (
        [device("amd", 3, "GPU-51ccd2f89c1b0a7e"), device("amd", 1, "GPU-XX")],
        {
            "ROCR_VISIBLE_DEVICES": "GPU-51ccd2f89c1b0a7e,1",
            "HIP_VISIBLE_DEVICES": "0,1",
            "MOORAGE_GPU_UUIDS": "GPU-51ccd2f89c1b0a7e,GPU-XX",
            "MOORAGE_GPU_INDICES": "3,1",
        },
    ),
    "intel": (
        [device("intel", 0), device("intel", 2)],
        {
            "ZE_AFFINITY_MASK": "0,2",
            "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1",
            "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
            "MOORAGE_GPU_UUIDS": "GPU-intel-0,GPU-intel-2",
            "MOORAGE_GPU_INDICES": "0,2",
        },
    ),
    "apple": ([device("apple", 0)], {"MOORAGE_GPU_UUIDS": "GPU-apple-0", "MOORAGE_GPU_INDICES": "0"}),
    "unknown": ([device("acme", 4)], {"MOORAGE_GPU_UUIDS": "GPU-acme-4", "MOORAGE_GPU_INDICES": "4"}),
    "no GPU at all": (
        [],
        {
            "CUDA_VISIBLE_DEVICES": "",
            "NVIDIA_VISIBLE_DEVICES": "void",
            "ROCR_VISIBLE_DEVICES": "",
            "MOORAGE_GPU_UUIDS": "",
            "MOORAGE_GPU_INDICES": "",
        },
    ),
    "two vendors with one index": (
        [device("nvidia", 0), device("intel", 0)],
        {
            "CUDA_VISIBLE_DEVICES": "0",
            "NVIDIA_VISIBLE_DEVICES": "GPU-nvidia-0",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "ZE_AFFINITY_MASK": "0",
            "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1",
            "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
            "MOORAGE_GPU_UUIDS": "GPU-nvidia-0,GPU-intel-0",
            "MOORAGE_GPU_INDICES": "0,0",
        },
    ),
}


@pytest.mark.parametrize(("devices", "expected"), BY_VENDOR.values(), ids=BY_VENDOR)
def test_fact_47_each_vendor_has_its_own_variables_with_the_leased_devices(
    devices: list[Device], expected: dict[str, str]
) -> None:
    assert environment(*devices) == {**OF_MEMBER, **expected}


GPUS = [Device(5, "nvidia", "a", "GPU-a"), Device(2, "nvidia", "b", "GPU-b")]
SLICE = [Device(5, "nvidia", "a", "MIG-a", mig=True, profile="1g.10gb")]
FROM_SPECS = [Device(3, "nvidia", "a", "CDI-f00df00df00d-3")]
WSL2 = [Device(0, "nvidia", "a", "CDI-f00df00df00d-all")]
OWN, BY_UUID, MPS = {"sees_only_its_own": True}, {"by_uuid": True}, {"mode": "mps", "has_own_mps": True}


@pytest.mark.parametrize(
    ("devices", "more", "shown"),
    [
        (GPUS, {}, "5,2"),
        (GPUS, OWN, "0,1"),
        (GPUS[:1], MPS, "0"),
        (GPUS[:1], {"has_own_mps": True}, "5"),
        (GPUS, BY_UUID, "GPU-a,GPU-b"),
        (GPUS, OWN | BY_UUID, "GPU-a,GPU-b"),
        (SLICE, {}, "MIG-a"),
        (SLICE, OWN, "MIG-a"),
        (FROM_SPECS, {}, "3"),
        (FROM_SPECS, BY_UUID, "3"),
        (FROM_SPECS, OWN, None),
        (WSL2, {}, None),
    ],
)
def test_cuda_gets_numbers_that_a_program_understands(
    devices: list[Device], more: dict[str, object], shown: str | None
) -> None:
    found = environment(*devices, **more)
    assert found.get("CUDA_VISIBLE_DEVICES") == shown
    assert found["NVIDIA_VISIBLE_DEVICES"] == found["MOORAGE_GPU_UUIDS"] == ",".join(each.uuid for each in devices)
    assert found["MOORAGE_GPU_INDICES"] == ",".join(str(each.index) for each in devices)
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


async def test_fact_47_holds_for_what_the_drm_inventory_lists(tmp_path: Path) -> None:
    """Indices are what each vendor's runtime counts, and uuids what ROCm takes, or else its index stands in."""
    machine = MadeUpMachine(tmp_path)
    machine.amd(128, "0000:83:00.0")
    machine.amd(129, "0000:03:00.0", unique_id=None)
    machine.kfd(128, 129)
    machine.pci(130, "0000:00:02.0", 0x8086, 0xA780, "i915")
    machine.pci(131, "0000:04:00.0", 0x8086, 0x56A0, "xe")
    machine.pci(132, "0000:05:00.0", 0x1ED5, 0x0222, "mtgpu")
    amd_with, amd_without, integrated, arc, other = (await open_drm(root=tmp_path)).devices()
    found = environment(amd_without, amd_with)
    assert (found["ROCR_VISIBLE_DEVICES"], found["HIP_VISIBLE_DEVICES"]) == ("1,GPU-a1b2c3d4e5f60080", "0,1")
    assert environment(arc)["ZE_AFFINITY_MASK"] == "1"
    assert environment(integrated)["ZE_AFFINITY_MASK"] == "0"
    assert environment(other) == {**OF_MEMBER, "MOORAGE_GPU_UUIDS": "0000:05:00.0", "MOORAGE_GPU_INDICES": "0"}


@pytest.mark.parametrize("vendor", ["amd", "intel"])
def test_fact_49_the_index_is_the_vendors_own(vendor: str) -> None:
    spec = GpuSpec(sharing="time-slice", time_slice_index=1, vendor=vendor)
    found = environment(device(vendor, 1), mode="time-slice", gpu_spec=spec)
    assert found["MOORAGE_GPU_INDICES"] == "1"
    with pytest.raises(SharingUnavailable):
        environment(device(vendor, 0), mode="time-slice", gpu_spec=spec)


def test_the_trace_of_the_request_reaches_the_job() -> None:
    assert environment(traceparent="00-ab-cd-01")["TRACEPARENT"] == "00-ab-cd-01"
    assert "TRACEPARENT" not in environment()


def test_fact_48_mps_exports_the_directories_of_the_daemon(tmp_path: Path) -> None:
    pipes, logs = tmp_path / "pipe", tmp_path / "log"
    pipes.mkdir()
    logs.mkdir()
    spec = GpuSpec(sharing="mps", mps_pipe_dir=str(pipes), mps_log_dir=str(logs))
    found = environment(device("nvidia", 0), mode="mps", gpu_spec=spec)
    assert found["CUDA_MPS_PIPE_DIRECTORY"] == str(pipes)
    assert found["CUDA_MPS_LOG_DIRECTORY"] == str(logs)


def test_a_share_is_the_limit_of_a_client_of_the_operators_daemon() -> None:
    memory, compute = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    both = GpuSpec(count=2, sharing="mps", share=Share(memory_mib=2048, compute_percent=25))
    found = environment(device("nvidia", 2), device("nvidia", 5), mode="mps", gpu_spec=both, simulated=True)
    assert (found[memory], found[compute]) == ("0=2048M,1=2048M", "25"), "a client counts its own devices"
    for spec in (GpuSpec(sharing="mps"), GpuSpec(sharing="mps", share=Share())):
        found = environment(device("nvidia", 0), mode="mps", gpu_spec=spec, simulated=True)
        assert not {memory, compute} & found.keys(), "no part is asked for"
    sliced = GpuSpec(sharing="time-slice", share=Share(memory_mib=2048, compute_percent=25))
    assert not {memory, compute} & environment(device("nvidia", 0), mode="time-slice", gpu_spec=sliced).keys()
    own = environment(device("nvidia", 0), mode="mps", gpu_spec=both, simulated=True, has_own_mps=True)
    assert not {memory, compute} & own.keys(), "a daemon of the worker's gives them"


def test_fact_48_mps_defaults() -> None:
    found = environment(device("nvidia", 0), mode="mps", simulated=True)
    assert found["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/nvidia-mps"
    assert found["CUDA_MPS_LOG_DIRECTORY"] == "/tmp/nvidia-log"


@pytest.mark.parametrize("missing", ["pipe", "log"])
def test_fact_48_a_missing_directory_is_an_error(tmp_path: Path, missing: str) -> None:
    for name in {"pipe", "log"} - {missing}:
        (tmp_path / name).mkdir()
    spec = GpuSpec(sharing="mps", mps_pipe_dir=str(tmp_path / "pipe"), mps_log_dir=str(tmp_path / "log"))
    with pytest.raises(SharingUnavailable) as refused:
        environment(device("nvidia", 0), mode="mps", gpu_spec=spec)
    assert (refused.value.mode, refused.value.path) == ("mps", str(tmp_path / missing))
    assert refused.value.code == "failed-precondition"


@pytest.mark.parametrize("mode", ["exclusive", "time-slice"])
def test_fact_48_no_mps_variable_in_another_mode(mode: str) -> None:
    spec = GpuSpec(mps_pipe_dir="/nowhere", mps_log_dir="/nowhere")
    found = environment(device("nvidia", 0), mode=mode, gpu_spec=spec)
    assert not [name for name in found if "MPS" in name]


def test_fact_49_a_time_slice_index_leaves_exactly_that_device() -> None:
    spec = GpuSpec(sharing="time-slice", time_slice_index=2)
    found = environment(device("nvidia", 2), mode="time-slice", gpu_spec=spec)
    assert found["CUDA_VISIBLE_DEVICES"] == "2"
    assert found["MOORAGE_GPU_INDICES"] == "2"


@pytest.mark.parametrize("indices", [(1,), (1, 2)])
def test_fact_49_a_lease_of_another_device_is_refused(indices: tuple[int, ...]) -> None:
    spec = GpuSpec(sharing="time-slice", time_slice_index=2)
    with pytest.raises(SharingUnavailable) as refused:
        environment(*(device("nvidia", index) for index in indices), mode="time-slice", gpu_spec=spec)
    assert refused.value.mode == "time-slice"


def test_the_time_slicing_file_must_be_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "slices.yaml"
    spec = GpuSpec(sharing="time-slice", time_slicing_config_path=str(path))
    with pytest.raises(SharingUnavailable):
        environment(device("nvidia", 0), mode="time-slice", gpu_spec=spec)
    path.mkdir()
    with pytest.raises(SharingUnavailable) as refused:
        environment(device("nvidia", 0), mode="time-slice", gpu_spec=spec)
    assert (refused.value.mode, refused.value.path) == ("time-slice", str(path))
    path.rmdir()
    path.write_text("slices: 4\n")
    assert environment(device("nvidia", 0), mode="time-slice", gpu_spec=spec)


INTERFACES = [
    ("nccl", "ib0", {"NCCL_SOCKET_IFNAME": "ib0"}),
    ("gloo", "ib0", {"GLOO_SOCKET_IFNAME": "ib0"}),
    ("mpi", "ib0", {}),
    ("nccl", None, {}),
    ("gloo", None, {}),
]


@pytest.mark.parametrize(("backend", "interface", "expected"), INTERFACES)
def test_fact_50_the_gang_meets_and_only_a_named_interface_is_set(
    backend: str, interface: str | None, expected: dict[str, str]
) -> None:
    spec = GpuSpec(scheduling="gang", distributed=Distributed(backend=backend))
    found = environment(device("nvidia", 0), gpu_spec=spec, gang=Gang(4, "10.0.0.7", 29501, interface))
    alone = environment(device("nvidia", 0), gpu_spec=spec)
    assert {name: value for name, value in found.items() if name not in alone} == {
        "WORLD_SIZE": "4",
        "RANK": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "29501",
        "NODE_RANK": "2",
        "PET_NNODES": "4",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "10.0.0.7",
        "PET_MASTER_PORT": "29501",
        **expected,
    }


def test_fact_51_ranks_are_unique_and_share_one_address() -> None:
    found = [
        gpu_environment(
            [device("nvidia", 0)], tenant="t", job="j", replica=rank, attempt=0, fence=9, gang=Gang(3, "h", 1)
        )
        for rank in range(3)
    ]
    assert [each["RANK"] for each in found] == ["0", "1", "2"]
    assert {(each["WORLD_SIZE"], each["MASTER_ADDR"], each["MASTER_PORT"]) for each in found} == {("3", "h", "1")}


@pytest.mark.parametrize(("least", "range_"), [(0, "3"), (2, "2:3"), (3, "3")])
def test_torchrun_has_the_range_of_a_gang_of_no_fixed_size(least: int, range_: str) -> None:
    found = environment(device("nvidia", 0), gang=Gang(3, "h", 1, least=least))
    assert (found["WORLD_SIZE"], found["PET_NNODES"]) == ("3", range_)


TF_PATHS = [
    ({"PATH": "cur", "TF_PATH": "app"}, "cur:app"),
    ({"PATH": "cur", "TF_PREPEND_PATH": "pre"}, "pre:cur"),
    ({"TF_PATH": "app"}, "app"),
    ({"PATH": "", "TF_PATH": "app"}, "app"),
    ({"PATH": "a:app", "TF_PATH": "app"}, "a:app"),
    ({"PATH": "a:pre", "TF_PREPEND_PATH": "pre"}, "a:pre"),
    ({"PATH": "cur", "TF_PATH": "app", "TF_PREPEND_PATH": "pre"}, "pre:cur:app"),
    ({"PATH": "cur", "TF_PATH": "x", "TF_PREPEND_PATH": "x"}, "cur:x"),
    ({"PATH": "cur", "TF_PATH": "/a:/b"}, "cur:/a:/b"),
    ({"PATH": "cur:/a", "TF_PATH": "/a:/b:/b"}, "cur:/a:/b"),
    ({"PATH": "cur", "TF_PATH": ""}, "cur"),
    ({"PATH": "cur", "TF_PATH": ":x:"}, "cur:x"),
]


@pytest.mark.parametrize(("given", "path"), TF_PATHS)
def test_fact_52_paths_are_extended_component_by_component(given: dict[str, str], path: str) -> None:
    once = apply_tf_paths(given)
    assert once["PATH"] == path
    assert apply_tf_paths(once) == once


def test_fact_53_only_three_paths_are_extended() -> None:
    names = ["PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH"]
    given = {f"TF_{name}": f"/{name}" for name in names}
    assert apply_tf_paths(given) == given | {name: f"/{name}" for name in names[:3]}


def test_fact_53_preloads_are_split_at_spaces_too() -> None:
    given = {"LD_PRELOAD": "a.so b.so", "TF_LD_PRELOAD": "b.so c.so"}
    assert apply_tf_paths(given)["LD_PRELOAD"] == "a.so b.so:c.so"


def test_ours_win_and_the_rest_of_the_request_is_kept() -> None:
    requested = {"SEED": "7", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "MOORAGE_FENCE": "9999", "WORLD_SIZE": "1"}
    found = lay_over(requested, environment(device("nvidia", 0)))
    assert found["SEED"] == "7"
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert found["MOORAGE_FENCE"] == "771"
    assert found["WORLD_SIZE"] == "1"  # not a gang: the word is the request's


def test_frameworks_find_their_node_in_a_gang_unless_the_request_says_it() -> None:
    """Lightning read no other variable than NODE_RANK, and torchrun made a world of its own in each replica."""
    ours = environment(device("nvidia", 0), gang=Gang(4, "10.0.0.7", 29501))
    requested = {"NODE_RANK": "7", "PET_NNODES": "1", "RANK": "9"}
    found = lay_over(requested, ours)
    assert (found["NODE_RANK"], found["PET_NNODES"]) == ("7", "1"), "the request's go before"
    assert (found["RANK"], found["PET_NODE_RANK"], found["PET_MASTER_PORT"]) == ("2", "2", "29501")
    assert not warnings_of(["NODE_RANK", "PET_NNODES"], gang=True, mps=False), "they are not dropped"
    alone = lay_over(requested, environment(device("nvidia", 0)))
    assert GANG_DEFAULTS & alone.keys() == {"NODE_RANK", "PET_NNODES"}, "set in gangs alone"


@pytest.mark.parametrize(
    "name", sorted({*RESERVED, "MOORAGE_ANYTHING", "NVIDIA_IMEX_CHANNELS", "NVIDIA_GDS", "NVIDIA_ANYTHING"})
)
def test_a_reserved_name_is_never_the_requests_own(name: str) -> None:
    assert lay_over({name: "all"}, environment(device("nvidia", 0), mode="mps", simulated=True)).get(name) != "all"


@pytest.mark.parametrize("gang", [None, Gang(4, "10.0.0.1", 29500)])
def test_what_is_dropped_is_what_the_submit_warns_of(gang: Gang | None) -> None:
    requested = dict.fromkeys((*RESERVED, *OF_GANGS, "MOORAGE_X", "SEED", "PATH"), "mine")
    found = lay_over(requested, environment(device("nvidia", 0), gang=gang, mode="mps", simulated=True))
    dropped = {name for name in requested if found.get(name) != "mine"}
    assert dropped == {name for name in requested if warnings_of([name], gang=gang is not None, mps=True)}
    assert not warnings_of(["SEED"], gang=True, mps=True)
    (warning,) = warnings_of(["RANK", "CUDA_DEVICE_ORDER"], gang=True, mps=True)
    assert warning.startswith("reserved-variable: CUDA_DEVICE_ORDER, RANK are")


def test_a_job_that_does_not_share_by_mps_is_kept_from_daemons_unless_it_names_one() -> None:
    gpu, pipe = device("nvidia", 0), MPS_DIRECTORIES[0]
    ours = environment(gpu) | apart_from_mps([gpu], "exclusive", "/attempt")
    assert ours[pipe] == "/attempt/mps"
    assert not warnings_of([MPS_DIRECTORIES[1]], gang=False, mps=False), "a directory of logs alone joins no daemon"
    assert lay_over({pipe: "/own"}, ours)[pipe] == "/own"
    (warning,) = warnings_of([pipe], gang=False, mps=False)
    assert warning.startswith(f"joins-mps: the request sets {pipe}")
    assert not apart_from_mps([gpu], "mps", "/attempt") | apart_from_mps([device("amd", 0)], "exclusive", "/attempt")


def test_a_process_inherits_nothing_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_TOKEN", "do not hand on")
    ours = environment()
    found = process_environment({"SEED": "7"}, ours, cwd="/srv")
    assert found == {
        **ours,
        "SEED": "7",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/srv",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }


def test_what_says_how_numbers_are_rounded_is_the_requests_own() -> None:
    assert lay_over({"NVIDIA_TF32_OVERRIDE": "0"}, {})["NVIDIA_TF32_OVERRIDE"] == "0"


@pytest.mark.parametrize(
    ("given", "found"), [({}, "1"), ({"PYTHONUNBUFFERED": ""}, ""), ({"PYTHONUNBUFFERED": "0"}, "0")]
)
def test_python_prints_at_once_unless_the_request_says_otherwise(given: dict[str, str], found: str) -> None:
    assert process_environment(given, environment())["PYTHONUNBUFFERED"] == found


def test_a_process_has_the_home_of_its_user_and_its_own_words_over_the_base() -> None:
    assert process_environment({}, {}, user="0")["HOME"] == process_environment({}, {}, user="root")["HOME"] == "/root"
    for nobody in ("no such user", "nobody\0", "\udc80", "²", "9" * 40, ""):
        assert process_environment({}, {}, user=nobody)["HOME"] == "/"
    found = process_environment({"LANG": "de_DE", "HOME": "/h", "PATH": "/p", "TF_PATH": "/q"}, {})
    assert (found["LANG"], found["HOME"], found["PATH"]) == ("de_DE", "/h", "/p:/q")


def test_a_child_sees_the_devices_of_its_lease_and_no_others_and_has_its_paths() -> None:
    own = {
        "HOME": "/h",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "9",
        "ROCR_VISIBLE_DEVICES": "3",
        "MOORAGE_TENANT": "t",
    }
    ours = {"CUDA_VISIBLE_DEVICES": "GPU-1", "TF_PREPEND_PATH": "/opt"}
    assert dict(child_environment(own, ours)) == {
        "HOME": "/h",
        "PATH": "/opt:/bin",
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "MOORAGE_TENANT": "t",
        "TF_PREPEND_PATH": "/opt",
    }
    assert own["CUDA_VISIBLE_DEVICES"] == "9"
