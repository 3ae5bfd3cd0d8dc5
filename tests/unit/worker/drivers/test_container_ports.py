"""Ports of containers: who may have which, that none is given twice, and what is told of them and of a pull."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.frames import Output, Start
from moorage.schemas.gpu import Distributed, GpuSpec
from moorage.schemas.job import Request, Run
from moorage.system.device_environment import HostAtFault
from moorage.worker.attempt.environment import LacksHere
from moorage.worker.driver import Assignment
from moorage.worker.drivers.container.config import (
    ContainerSettings,
    check_container_policy,
    check_network,
    check_request,
    config_of,
    ports_of,
)
from moorage.worker.drivers.container.podman import spec_of
from moorage.worker.drivers.container.ports import FOLDER, Ports, Published
from moorage.worker.drivers.container.pull import LAYERS_MAX, PullProgress
from moorage.worker.drivers.output_frames import NOTE_CHARS_MAX, NOTE_S, Notes
from moorage.worker.drivers.policy import Policy

NO_RULES = Policy({}, {}, {}, None, {})
NAME = ("acme", "j", 0, 1, 7)
OWNER = "w1@docker"


def request(*ports: int, replicas: int = 1) -> Request:
    gang = GpuSpec(scheduling="gang", distributed=Distributed()) if replicas > 1 else None
    config = {"docker": {"ports": list(ports)}} if ports else {}
    return Request(run=Run(driver="docker", image="a", argv=["x"]), replicas=replicas, gpu=gang, driver_config=config)


def free_range(count: int) -> range:
    """Ports of this machine that nothing listens on, one behind another."""
    for first in range(20000, 30000, count):  # below what a system gives to connections, which come and go
        with socket.socket() as probe:
            if all(probe.connect_ex(("127.0.0.1", port)) for port in range(first, first + count)):
                return range(first, first + count)
    raise AssertionError("no free ports")


def test_no_port_is_given_twice_and_each_goes_round_once_its_container_is_over(tmp_path: Path) -> None:
    allowed = free_range(3)
    first, second, third = allowed
    ports = Ports(tmp_path, OWNER, "127.0.0.1")
    others = Ports(tmp_path, "w1@podman", "127.0.0.1")
    assert ports.take("a", [80, 443], allowed).addresses == {"80": f"127.0.0.1:{first}", "443": f"127.0.0.1:{second}"}
    with pytest.raises(HostAtFault, match=rf"the job needs 2 ports, and 1 of {first}-{third} are free"):
        others.take("b", [80, 81], allowed)
    assert others.of("b") == {}
    assert others.take("b", [80], allowed).ports == {80: third}
    assert ports.take("a", [80], allowed).ports == {80: first}, "its own do not stand in its way"
    ports.give_back("a")
    ports.give_back("a")
    with socket.create_server(("127.0.0.1", first)):
        assert ports.take("c", [80], allowed).ports == {80: second}, "a listener has the first"


def test_the_next_agent_knows_the_ports_of_what_runs_and_forgets_the_rest(tmp_path: Path) -> None:
    allowed = free_range(2)
    before = Ports(tmp_path, OWNER, "gpu-7.example")
    for key in ("a", "b"):
        before.take(key, [80], allowed)
    Ports(tmp_path, "w2@docker", None).begin([])
    after = Ports(tmp_path, OWNER, None)
    after.begin(["a"])
    assert after.of("a") == {"80": f"gpu-7.example:{allowed[0]}"}
    assert after.of("b") == {}
    (left,) = (tmp_path / FOLDER).iterdir()
    left.write_text("no record")
    assert after.of("a") == {}
    assert after.take("c", [80], allowed).ports == {80: allowed[0]}


def test_an_operator_rules_by_tenant_over_ports() -> None:
    own = ContainerSettings(network="lan", ports="30000-30009", ports_for={"acme": "40000-40001", "none": ""})
    assert [ports_of(tenant, own) for tenant in ("acme", "none", "else")] == [
        range(40000, 40002),
        range(0),
        range(30000, 30010),
    ]
    check_request(request(80), own)
    check_container_policy("acme", request(80), own, NO_RULES)
    check_network("acme", request(80), own)
    with pytest.raises(Refused, match="containers of none may not publish ports") as refused:
        check_container_policy("none", request(80), own, NO_RULES)
    assert refused.value.code == "not-permitted"
    check_container_policy("none", request(), own, NO_RULES)
    with pytest.raises(Refused, match="publish no ports of its host") as refused:
        check_request(request(80), ContainerSettings())
    assert refused.value.code == "failed-precondition", "another worker may have ports"
    with pytest.raises(LacksHere, match="their network is none"):
        check_network("acme", request(80), ContainerSettings(ports="1-2"))
    with pytest.raises(LacksHere, match="their network is host"):
        check_network("acme", request(80, replicas=2), ContainerSettings(ports="1-2", gangs_on_host=("*",)))
    with pytest.raises(LacksHere, match=r"^the ranks of a gang of acme cannot meet"):
        check_network("acme", request(replicas=2), ContainerSettings(network_for={"*": "none"}))
    for wrong in ("80", "a-b", "9-1", "0-9", "1-65536", "1-2-3"):
        with pytest.raises(ValueError, match="ports_for must look like 30000-30999"):
            ContainerSettings(ports_for={"acme": wrong})


def made(asked: Request, own: ContainerSettings, start: Start | None = None, **more: Any) -> dict[str, Any]:
    name = (*NAME[:2], more.pop("rank", 0), *NAME[3:])
    assignment = Assignment(name, asked, [], "exclusive", start)
    return config_of(assignment, own, NO_RULES, None, labels={}, log_bytes=1 << 20, **more)


def test_a_container_is_reached_where_its_variables_say() -> None:
    own = ContainerSettings(network="lan")
    config = made(request(80), own, published=Published("gpu-7.example", "10.0.0.7", {80: 30001}))
    assert config["HostConfig"]["PortBindings"] == {"80/tcp": [{"HostIp": "10.0.0.7", "HostPort": "30001"}]}
    assert config["ExposedPorts"] == {"80/tcp": {}}
    assert "MOORAGE_PORT_80=gpu-7.example:30001" in config["Env"]
    published = {"container_port": 80, "protocol": "tcp", "host_ip": "10.0.0.7", "host_port": 30001}
    assert spec_of(config, "c", ())["portmappings"] == [published]
    plain = made(request(), own)
    assert "ExposedPorts" not in plain
    assert spec_of(plain, "c", ())["portmappings"] == []


def test_ports_of_the_worker_are_the_same_inside_and_looked_at_by_their_names_alone() -> None:
    asked = Assignment(NAME, request(), [], "exclusive", ports=[20000, 20001])
    config = config_of(asked, ContainerSettings(network="lan"), NO_RULES, None, labels={}, log_bytes=0)
    bound = {f"{port}/tcp": [{"HostIp": "", "HostPort": str(port)}] for port in (20000, 20001)}
    assert config["HostConfig"]["PortBindings"] == bound
    assert {"PORT=20000", "PORT_1=20001"} <= {*config["Env"]}
    alone = config_of(asked, ContainerSettings(network="none"), NO_RULES, None, labels={}, log_bytes=0)
    assert "PortBindings" not in alone["HostConfig"]


def test_ranks_meet_at_the_host_of_rank_0_on_any_network() -> None:
    start = Start("acme", "j", 0, 1, 7, "10.0.0.7", 29500, 2)
    gang, bound = request(replicas=2), {"29500/tcp": [{"HostIp": "10.0.0.7", "HostPort": "29500"}]}
    lan, host = ContainerSettings(network="lan", shm=1 << 30, memlock=True), ContainerSettings(gangs_on_host=("acme",))
    for rank, own, expected in ((0, lan, bound), (1, lan, None), (0, host, None)):
        config = made(gang, own, start, rank=rank, interface="ib0")
        assert config["HostConfig"].get("PortBindings") == expected
        assert {"MASTER_ADDR=10.0.0.7", "MASTER_PORT=29500", f"RANK={rank}", "WORLD_SIZE=2"} <= {*config["Env"]}
        assert ("NCCL_SOCKET_IFNAME=ib0" in config["Env"]) == (own is host), "a container's network has others"
    spec = spec_of(made(gang, lan, start), "c", ())
    published = {"container_port": 29500, "protocol": "tcp", "host_ip": "10.0.0.7", "host_port": 29500}
    assert (spec["portmappings"], spec["networks"], spec["shm_size"]) == ([published], {"lan": {}}, 1 << 30)
    assert {"type": "memlock", "soft": (1 << 64) - 1, "hard": (1 << 64) - 1} in spec["r_limits"]
    assert spec_of(made(gang, host, start), "c", ())["netns"] == {"nsmode": "host"}
    named = msgspec.structs.replace(start, master_addr="gpu-7.example")
    (binding,) = made(gang, lan, named)["HostConfig"]["PortBindings"]["29500/tcp"]
    assert binding["HostIp"] == "", "engines take no name"
    alone = msgspec.structs.replace(start, world_size=1, master_addr="127.0.0.1")
    assert "PortBindings" not in made(request(), lan, alone)["HostConfig"]


def test_a_pull_is_told_in_a_line_that_never_goes_back() -> None:
    progress = PullProgress("a/b:1")
    assert progress.text == "pulling the image a/b:1"

    def told(layer: str, status: str, *bytes_: int) -> str:
        detail = dict(zip(("current", "total"), bytes_, strict=False))
        progress.add({"id": layer, "status": status, "progressDetail": detail})
        return progress.text

    assert told("1", "Downloading", 30 << 20, 100 << 20) == "pulling the image a/b:1: 30 % of 100 MiB"
    assert told("2", "Downloading", 0, 100 << 20) == "pulling the image a/b:1: 30 % of 200 MiB", "15 %, by now"
    assert told("1", "Download complete") == "pulling the image a/b:1: 50 % of 200 MiB"
    assert told("1", "Extracting", 1, 100 << 20).endswith("50 % of 200 MiB")
    assert told("3", "Downloading", 5, 0).endswith("50 % of 200 MiB")
    for strange in ({}, {"status": "Downloading"}, {"status": "Downloading", "progressDetail": {"current": "x"}}):
        progress.add(strange)
    for at in range(2 * LAYERS_MAX):
        told(f"more-{at}", "Downloading", 1, 2)
    assert len(progress._layers) == LAYERS_MAX


def test_notes_are_few_and_short_and_nothing_is_kept_of_an_attempt_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, sent = [100.0], list[Output]()
    monkeypatch.setattr("moorage.worker.drivers.output_frames.time.monotonic", lambda: now[0])
    notes = Notes(lambda _, raw: sent.append(msgspec.json.decode(raw, type=Output)))
    for at in range(1000):
        notes.publish_note(NAME, f"{at} " + "x" * 1000)
        now[0] += NOTE_S / 100
    assert len(sent) == 10
    assert {len(each.note) for each in sent} == {NOTE_CHARS_MAX}
    now[0] += NOTE_S
    notes.publish_note(NAME, "the same")
    now[0] += NOTE_S
    notes.publish_note(NAME, "the same")
    assert len(sent) == 11
    notes.started(NAME, {})
    assert len(sent) == 11
    notes.started(NAME, {"80": "h:1"})
    assert (sent[-1].ports, sent[-1].text, sent[-1].offset, sent[-1].next) == ({"80": "h:1"}, "", 0, 0), "no output"
    notes.publish_note(NAME, "again")
    notes.forget(NAME)
    assert not notes._said
    silent = Notes(None)
    silent.started(NAME, {"80": "h:1"})
    assert len(sent) == 13
