"""What a container is made with: what operators allow, its user, GPUs, paths and limits; no engine is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Run
from moorage.system.device_environment import SharingUnavailable
from moorage.worker.attempt.environment import PATH_DEFAULT
from moorage.worker.devices.readers import cdi
from moorage.worker.driver import Assignment
from moorage.worker.drivers.container.config import (
    ContainerSettings,
    Image,
    check_container_policy,
    config_of,
    devices_of,
    network_of,
)
from moorage.worker.drivers.container.docker import DockerSettings
from moorage.worker.drivers.container.engine import with_tag
from moorage.worker.drivers.container.entry import PROGRAM_AT, VARIABLES_AT
from moorage.worker.drivers.container.podman import PodmanSettings, spec_of
from moorage.worker.drivers.policy import Policy

NO_RULES: Final = Policy({}, {}, {}, None, {})


def request(**run: Any) -> Request:
    return Request(run=Run(driver="docker", **run))


@pytest.mark.parametrize(
    ("own", "run", "word"),
    [
        ({"images": ("ours/*",)}, {}, "image theirs/a may not run"),
        ({"digests_only": True}, {}, "not named by its digest"),
        ({}, {"user": "0"}, "may not name its user"),
    ],
)
async def test_what_the_operator_does_not_allow_fails_the_attempt(
    tmp_path: Path, own: dict[str, Any], run: dict[str, Any], word: str
) -> None:
    with pytest.raises(Refused, match=word) as refused:
        check_container_policy("acme", request(image="theirs/a", **run), DockerSettings(**own), NO_RULES)
    assert refused.value.code == "not-permitted"


@pytest.mark.parametrize("run", [{}, {"argv": ["sh"]}], ids=["the image's program", "its own program"])
def test_a_tenant_without_a_user_runs_no_image_where_users_are_set_by_tenant(run: dict[str, Any]) -> None:
    users = Policy({}, {}, {"beta": "41001"}, None, {})
    with pytest.raises(Refused, match="no user is set for jobs of tenant acme"):
        check_container_policy("acme", request(image="a", **run), DockerSettings(), users)
    check_container_policy("beta", request(image="a", **run), DockerSettings(), users)


def test_an_operator_rules_by_tenant_over_images_mounts_and_networks() -> None:
    own = DockerSettings(
        images=("ours/*",), images_for={"acme": "theirs/* ours/x"}, mounts=("/data:/data:ro",),
        mounts_for={"acme": "/a:/a:rw /b:/b:ro", "*": "/c:/c:ro"}, network="none", network_for={"acme": "lan"},
        gangs_on_host=("acme",), memlock=True,
    )  # fmt: skip
    for tenant, image, is_allowed in (
        ("acme", "theirs/a", True), ("acme", "ours/a", False), ("other", "ours/a", True), ("other", "theirs/a", False),
    ):  # fmt: skip
        with contextlib.nullcontext() if is_allowed else pytest.raises(Refused, match="may not run"):
            check_container_policy(tenant, request(image=image), own, NO_RULES)
    with pytest.raises(Refused, match=r"may not run on this worker \(allowed: none\)"):
        check_container_policy("acme", request(image="x"), DockerSettings(images_for={"acme": ""}), NO_RULES)
    host = made(own, [])["HostConfig"]
    assert (host["NetworkMode"], host["Binds"]) == ("lan", ["/data:/data:ro", "/a:/a:rw", "/b:/b:ro"])
    assert host["Ulimits"] == [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    gang = msgspec.structs.replace(request(image="a"), gpu=GpuSpec(scheduling="gang"), replicas=2)
    assert [network_of(tenant, gang, own) for tenant in ("acme", "other")] == ["host", "none"]
    assert network_of("acme", request(image="a"), own) == "lan", "the host's network is for ranks alone"
    wrong: list[dict[str, Any]] = [
        {"network_for": {"acme": "host"}}, {"network_for": {"acme": "container:x"}}, {"mounts_for": {"*": "/etc"}},
        {"images_for": {"a b": "x"}}, {"ports_for": {"acme": "80"}}, {"ports": "80"}, {"network": ""},
    ]  # fmt: skip
    for fields in wrong:
        with pytest.raises(ValueError, match=f"^{next(iter(fields))} must"):
            DockerSettings(**fields)


def made(
    own: DockerSettings, devices: list[Device], nodes: Mapping[str, Sequence[str]] = MappingProxyType({}), **run: Any
) -> dict[str, Any]:
    asked = Assignment(("acme", "j", 0, 1, 7), request(image="a", **run), devices, "exclusive")
    return config_of(asked, own, NO_RULES, None, labels={}, log_bytes=1 << 20, nodes=nodes)


def test_a_job_is_not_root_and_sees_no_gpu_unless_it_is_given_one() -> None:
    config = made(DockerSettings(), [], argv=["x"], env={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert config["User"] == "65534:65534"
    assert "NVIDIA_VISIBLE_DEVICES=void" in config["Env"], "an image may say all by itself"
    assert "DeviceRequests" not in config["HostConfig"]
    assert made(DockerSettings(user="image"), [])["User"] == ""
    for wrong in ({"network": "host"}, {"network": "container:x"}, {"user": "root"}, {"mounts": ("/etc",)}):
        with pytest.raises(ValueError, match=r"must be|must look like"):
            DockerSettings(**wrong)


def test_the_paths_of_an_image_are_extended_and_others_are_left_to_it() -> None:
    image = Image.of({"Config": {"Env": ["PATH=/opt/conda/bin:/bin", "LD_LIBRARY_PATH=/opt/lib", "A=b"]}})

    def variables(image: Image, **env: str) -> dict[str, str]:
        asked = Assignment(("acme", "j", 0, 1, 7), request(image="a", argv=["x"], env=env), [], "none")
        config = config_of(asked, DockerSettings(), NO_RULES, None, image, labels={}, log_bytes=1 << 20)
        found = dict(each.split("=", 1) for each in config["Env"])
        return {name: found[name] for name in ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "A") if name in found}

    assert variables(image) == {}
    added = variables(image, TF_PATH="/app", TF_PREPEND_LD_LIBRARY_PATH="/mine", TF_LD_PRELOAD="x.so")
    assert added == {
        "PATH": "/opt/conda/bin:/bin:/app", "LD_LIBRARY_PATH": "/mine:/opt/lib", "LD_PRELOAD": "x.so",
    }  # fmt: skip
    assert variables(image, TF_PATH="/bin") == {}, "it is there"
    assert variables(image, PATH="/own", TF_PATH="/app") == {"PATH": "/own:/app"}
    assert variables(Image(), TF_PATH="/app") == {"PATH": f"{PATH_DEFAULT}:/app"}, "as engines set it"


def test_a_time_slicing_file_is_mounted_read_only_where_the_operator_permits_it(tmp_path: Path) -> None:
    file = tmp_path / "slices.yaml"
    file.write_text("version: v1\n")
    asks = request(image="a", argv=["x"]), GpuSpec(sharing="time-slice", time_slicing_config_path=str(file))
    asked = msgspec.structs.replace(asks[0], gpu=asks[1])
    own = DockerSettings(time_slicing_configs=(f"{tmp_path}/*.yaml",))
    check_container_policy("acme", asked, own, NO_RULES)
    devices = [Device(0, "nvidia", "H100", "GPU-a")]
    assignment = Assignment(("acme", "j", 0, 1, 7), asked, devices, "time-slice")
    config = config_of(assignment, own, NO_RULES, None, labels={}, log_bytes=1 << 20)
    target = "/etc/nvidia/gpu-time-slicing.yaml"
    assert config["HostConfig"]["Mounts"] == [{"Type": "bind", "Source": str(file), "Target": target, "ReadOnly": True}]
    assert made(own, devices)["HostConfig"]["Mounts"] == [], "a job that names none has none"
    for path in (f"{tmp_path}/../shadow.yaml", "/etc/shadow", f"{tmp_path}/a,U=true.yaml"):
        elsewhere = msgspec.structs.replace(asks[1], time_slicing_config_path=path)
        with pytest.raises(Refused, match="may not be mounted"):
            check_container_policy("acme", msgspec.structs.replace(asked, gpu=elsewhere), own, NO_RULES)
    with pytest.raises(Refused, match="may not be mounted"):
        check_container_policy("acme", asked, DockerSettings(), NO_RULES)
    file.unlink()
    with pytest.raises(SharingUnavailable, match="not a regular file"):
        config_of(assignment, own, NO_RULES, None, labels={}, log_bytes=1 << 20)


def specs_of(tmp_path: Path, *names: str) -> cdi.Registry:
    devices = [{"name": name, "containerEdits": {"deviceNodes": [{"path": "/dev/null"}]}} for name in names]
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec))
    return cdi.read_registry([tmp_path])


def test_gpus_come_by_cdi_where_the_engines_specs_have_all_of_them_and_by_the_hook_where_not(tmp_path: Path) -> None:
    own = DockerSettings(nvidia_capabilities="compute,utility,video")
    cards = [Device(0, "nvidia", "H100", "GPU-a"), Device(1, "nvidia", "H100", "GPU-b", cdi=["nvidia.com/gpu=1"])]
    asked, env = devices_of(cards, own, specs_of(tmp_path, "0", "1", "GPU-a"))
    assert asked == {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-a", "nvidia.com/gpu=1"]}]}
    assert env == {"NVIDIA_VISIBLE_DEVICES": "void", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility,video"}
    for specs in (None, cdi.Registry(), specs_of(tmp_path, "0", "1")):  # the last ones do not have GPU-a
        asked, env = devices_of(cards, own, specs)
        (one,) = asked["DeviceRequests"]
        assert (one["Driver"], one["DeviceIDs"]) == ("nvidia", ["GPU-a", "GPU-b"])
        assert one["Capabilities"] == [["gpu", "compute", "utility", "video"]]
        assert "NVIDIA_VISIBLE_DEVICES" not in env, "those of the lease stand"
    only_cdi = Device(0, "nvidia", "x", "CDI-f00df00df00d-0", cdi=["nvidia.com/gpu=0"])
    asked, _ = devices_of([only_cdi], own, cdi.Registry())
    assert asked["DeviceRequests"] == [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0"]}], "no hook knows it"


@pytest.mark.parametrize("vendor", ["amd", "intel"])
def test_a_card_of_another_vendor_brings_no_gpu_of_nvidia(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"]
    monkeypatch.setattr("pathlib.Path.exists", lambda path: str(path) in there)
    card = Device(0, vendor, "card", "u")
    config = made(DockerSettings(), [card], {"u": ("/dev/dri/renderD129",)}, env={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert "NVIDIA_VISIBLE_DEVICES=void" in config["Env"], "an image may say all by itself"
    given = [each["PathOnHost"] for each in config["HostConfig"]["Devices"]]
    assert given == (["/dev/kfd"] if vendor == "amd" else []) + ["/dev/dri/renderD129"], "its own, and no other card's"
    with pytest.raises(Refused, match="no file in /dev is known to be that of u") as refused:
        made(DockerSettings(), [card])
    assert refused.value.code == "failed-precondition", "another host may tell"


def test_of_an_image_without_a_tag_one_tag_is_pulled() -> None:
    digest = "@sha256:" + "0" * 64
    assert [with_tag(image) for image in ("a", "h:5/a", "h:5/a:1", "a:1", f"h:5/a{digest}", f"a{digest}")] == [
        "a:latest", "h:5/a:latest", "h:5/a:1", "a:1", f"h:5/a{digest}", f"a{digest}",
    ]  # fmt: skip


def test_limits_that_this_host_cannot_set_are_left_out() -> None:
    host = {
        "NetworkMode": "none", "IpcMode": "private", "ShmSize": 1, "CapDrop": [], "Binds": ["/a:/b:ro"],
        "PidsLimit": 9, "NanoCpus": 1_500_000_000, "Memory": 5, "MemorySwap": 5, "Devices": [{"PathOnHost": "/dev/x"}],
        "Mounts": [], "LogConfig": {"Config": {"max-size": "7"}},
    }  # fmt: skip
    config = {"HostConfig": host, "Labels": {}, "Env": ["A=b=c"], "User": "", "Image": "i", "Cmd": ["--help"]}
    spec = spec_of(config, "c", {"cpu", "memory", "pids"})
    assert spec["resource_limits"] == {
        "pids": {"limit": 9},
        "cpu": {"period": 100_000, "quota": 150_000},
        "memory": {"limit": 5, "swap": 5},
    }
    assert (spec["devices"], spec["env"], spec["command"]) == ([{"path": "/dev/x"}], {"A": "b=c"}, ["--help"])
    assert spec["mounts"] == [{"type": "bind", "source": "/a", "destination": "/b", "options": ["rbind", "ro"]}]
    assert spec_of(config, "c", ())["resource_limits"] == {}


def test_settings_that_no_container_can_have_are_refused() -> None:
    PodmanSettings()
    for wrong in ({"user": "root"}, {"network": "host"}, {"mounts": ("x",)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PodmanSettings(**wrong)


def test_an_entry_point_of_the_image_does_not_take_the_command_of_a_setup() -> None:
    image = Image(entry_point=("/entry.sh",), command=("serve",))
    words = ["/bin/sh", "-c", "pip install torch"]
    asked = Request(run=Run(driver="docker", image="a", argv=words))
    setup = Assignment(("acme", "setup.1", 0, 1, 7), asked, [], "none", setup="/s")
    plain = config_of(setup, ContainerSettings(), NO_RULES, None, image, labels={}, log_bytes=0)
    assert (plain["Entrypoint"], plain["Cmd"]) == (words[:2], words[2:])
    assert spec_of(plain, "c", ())["entrypoint"] == words[:2]
    secrets = Path("/v")
    kept = config_of(setup, ContainerSettings(), NO_RULES, None, image, labels={}, log_bytes=0, variables=secrets)
    assert (kept["Entrypoint"], kept["Cmd"]) == ([PROGRAM_AT, VARIABLES_AT], words)
    job = Assignment(("acme", "a", 0, 1, 7), asked, [], "none")
    own = config_of(job, ContainerSettings(), NO_RULES, None, image, labels={}, log_bytes=0, variables=secrets)
    assert own["Cmd"] == ["/entry.sh", *words]
