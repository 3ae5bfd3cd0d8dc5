"""Simulated hosts: the fleet's word, files, real hosts of a trace, and devices whose memory does not come back."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from moorage.system.simulated_hosts import HOSTS_MAX, MODELS, load_hosts, openb_hosts, simulated_hosts
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.readers.base import Inventory, SlotReading
from moorage.worker.devices.readers.simulated import BASELINE_MIB, SimulatedInventory

OPENB = Path(__file__).parents[4] / "testing/moorage/testing/demo/openb"

WORDS = {
    "4x8xH100": [["H100"] * 8] * 4,
    "8xH100": [["H100"] * 8],
    "1xt4": [["T4"]],
    "2xL40S,6xA100": [["L40S"] * 2 + ["A100"] * 6],
    "3x2xL40S,1xT4": [["L40S", "L40S", "T4"]] * 3,
    "2x8xH100 + 1x1xT4 + 2xcpu": [["H100"] * 8] * 2 + [["T4"]] + [[]] * 2,
    "cpu": [[]],
    "3xcpu": [[]] * 3,
    "2xA100-40G": [["A100-40G"] * 2],
}


@pytest.mark.parametrize(("word", "hosts"), WORDS.items(), ids=WORDS)
def test_a_fleet_is_a_word(word: str, hosts: list[list[str]]) -> None:
    found = simulated_hosts(word)
    expected = [[(MODELS[model].name, MODELS[model].memory_mib) for model in host] for host in hosts]
    assert [[(device.name, device.memory_mib) for device in host.devices] for host in found] == expected
    assert len({host.name for host in found}) == len(found)
    assert all(host.cpu_milli > 0 and host.memory_mib > 0 for host in found)


WRONG = [
    "",
    "H100",
    "8x",
    "0xH100",
    "65xH100",
    "40xH100,40xT4",
    "8xH100,0xT4",
    "8xH1OO",
    "0x8xH100",
    f"{HOSTS_MAX + 1}x1xT4",
    pytest.param(f"{HOSTS_MAX}x1xT4+cpu", marks=pytest.mark.slow),
    "2x3x4xH100",
    "8xH100,2x2xT4",
    "8xH100+",
    "8xH100,",
    "cpu,8xH100",
    "8xNew:24T",
]


@pytest.mark.parametrize("word", WRONG)
def test_what_is_no_fleet_is_refused_in_words(word: str) -> None:
    with pytest.raises(ValueError, match=r"simulated|unknown model"):
        simulated_hosts(word)


def test_an_unknown_model_needs_its_memory() -> None:
    with pytest.raises(ValueError, match="unknown model 'New': say its memory, as New:24G"):
        simulated_hosts("2xNew")
    (host,) = simulated_hosts("1xNew:24G,1xNew:1000M,1xH100:94G")
    assert [(device.name, device.memory_mib) for device in host.devices] == [
        ("New", 22888),
        ("New", 1000),
        ("NVIDIA H100 80GB HBM3", 89645),
    ]


def test_memory_is_what_the_driver_shows_of_each_model() -> None:
    shown = {"T4": 15109, "V100M16": 16160, "V100M32": 32510, "P100": 16280, "A10": 23028}
    shown |= {"A100-40G": 40960, "A100-80G": 81920, "L40S": 46068, "H100": 81559, "H200": 143771}
    assert {name: MODELS[name].memory_mib for name in shown} == shown


def test_a_host_is_the_same_machine_each_time() -> None:
    one, other = simulated_hosts("2x4xH100")
    assert simulated_hosts("2x4xH100") == [one, other]
    uuids = [device.uuid for host in (one, other) for device in host.devices]
    assert len(set(uuids)) == 8
    assert all(uuid.startswith("SIM-") for uuid in uuids)
    assert uuids[0] == "SIM-" + uuids[0][4:].lower()
    assert simulated_hosts("4xH100", "other")[0].devices[0].uuid not in uuids


def test_devices_have_places_and_links() -> None:
    (host,) = simulated_hosts("2xL40S,2xH100")
    assert [device.index for device in host.devices] == [0, 1, 2, 3]
    assert [device.peers for device in host.devices] == [[], [], [3], [2]]
    assert [device.numa for device in host.devices] == [0, 0, 1, 1]
    assert len({device.pci for device in host.devices}) == 4
    assert GpuPool(host.devices).capacity() == 4


async def test_a_simulated_device_is_idle_and_free_unless_told_otherwise() -> None:
    found: Inventory = SimulatedInventory(simulated_hosts("2xH100")[0])
    assert found.simulated
    assert [reading.health for reading in await found.sample()] == ["ok", "ok"]
    assert await found.memory_is_free(1)
    assert found.memory_baseline_mib(1) == BASELINE_MIB
    with pytest.raises(IndexError):
        found.memory_baseline_mib(2)
    found.close()


async def test_memory_that_does_not_come_back() -> None:
    found = SimulatedInventory(simulated_hosts("2xH100")[0])
    found.keep_memory(0, 40_000)
    assert [await found.memory_is_free(slot) for slot in (0, 1)] == [False, True]
    assert (await found.sample())[0].memory_used_mib == 40_000 + BASELINE_MIB
    found.set_reading(0, None)
    assert await found.memory_is_free(0)
    found.set_reading(1, SlotReading(util_percent=50, memory_used_mib=9000))
    assert (await found.sample())[1].util_percent == 50


async def test_faults_of_health_can_be_played() -> None:
    found = SimulatedInventory(simulated_hosts("3xH100")[0])
    found.set_health(0, "thermal")
    found.set_health(1, "ecc")
    found.set_health(2, "unresponsive")
    readings = await found.sample()
    assert [reading.health for reading in readings] == ["thermal", "ecc", "unresponsive"]
    assert (readings[0].temperature_c or 0) > 90
    assert [await found.memory_is_free(slot) for slot in range(3)] == [True, True, False]


TOML = """
[[host]]
name = "big"
count = 2
gpus = "2xL40S,6xA100"
cpu_milli = 64000

[[host]]
name = "odd"
memory_mib = 1000
[[host.device]]
index = 5
vendor = "amd"
name = "AMD Instinct MI300X"
uuid = "GPU-51ccd2f89c1b0a7e"
memory_mib = 196592

[[host]]
name = "plain"
"""
JSON = '{"host": [{"name": "big", "gpus": "8xH100"}]}'


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_hosts_from_a_file(tmp_path: Path) -> None:
    hosts = load_hosts(write(tmp_path, "fleet.toml", TOML))
    assert [host.name for host in hosts] == ["big-0000", "big-0001", "odd", "plain"]
    assert [len(host.devices) for host in hosts] == [8, 8, 1, 0]
    assert (hosts[0].cpu_milli, hosts[2].memory_mib) == (64000, 1000)
    assert (hosts[2].devices[0].index, hosts[2].devices[0].vendor) == (5, "amd")
    assert len({device.uuid for host in hosts for device in host.devices}) == 17
    assert len(load_hosts(write(tmp_path, "fleet.json", JSON))[0].devices) == 8
    for name, text in (("marked.toml", TOML), ("marked.json", JSON)):  # editors of Windows write a byte order mark
        assert load_hosts(write(tmp_path, name, "\ufeff" + text))[0].name.startswith("big")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"host": [{"gpu": "8xH100"}]}', "unknown field `gpu`"),
        ('{"host": [{"gpus": 8}]}', r"\$\.host\[0\]\.gpus"),
        ('{"host": [{"count": 0}]}', "count must be"),
        ('{"host": [{"name": "a"}, {"name": "a"}]}', "names a host twice"),
        ('{"host": [{"count": 60000, "name": "a"}, {"count": 60000, "name": "b"}]}', "at most 100000 hosts"),
        ('{"host": [{"gpus": "8xH100", "device": [{"index":0,"vendor":"v","name":"n","uuid":"u"}]}]}', "same"),
        (
            '{"host": [{"count": 2, "device": [{"index":0,"vendor":"v","name":"n","uuid":"u"}]}]}',
            "a device is on one host",
        ),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_hosts(write(tmp_path, "fleet.json", text))


def test_hosts_of_the_trace_are_those_of_its_rows() -> None:
    hosts = openb_hosts(OPENB / "nodes_sample.csv", 40, seed=1)
    with open(OPENB / "nodes_sample.csv", newline="") as file:
        rows = {row["sn"]: row for row in csv.DictReader(file)}
    assert {host.name for host in hosts} == set(rows)
    for host in hosts:
        row = rows[host.name]
        assert (host.cpu_milli, host.memory_mib) == (int(row["cpu_milli"]), int(row["memory_mib"]))
        assert [device.name for device in host.devices] == [MODELS[row["model"]].name] * int(row["gpu"])
    assert {row["model"] for row in rows.values()} == {"A10", "G2", "G3", "P100", "T4", "V100M16", "V100M32"}


def test_the_trace_is_drawn_by_seed_and_again_when_it_is_used_up() -> None:
    path = OPENB / "nodes_sample.csv"
    assert openb_hosts(path, 7, seed=3) == openb_hosts(path, 7, seed=3) != openb_hosts(path, 7, seed=4)
    hosts = openb_hosts(path, 100, seed=3)
    assert len({host.name for host in hosts}) == 100
    assert len({device.uuid for host in hosts for device in host.devices}) == sum(len(host.devices) for host in hosts)
    assert openb_hosts(path, 0, seed=3) == []


def test_a_trace_that_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hosts, found -1"):
        openb_hosts(OPENB / "nodes_sample.csv", -1, seed=1)
    with pytest.raises(ValueError, match="no rows"):
        openb_hosts(write(tmp_path, "empty.csv", "sn,cpu_milli,memory_mib,gpu,model\n"), 1, seed=1)


def test_the_sample_of_requests_fits_the_sample_of_hosts() -> None:
    with open(OPENB / "pods_sample.csv", newline="") as file:
        pods = list(csv.DictReader(file))
    assert [sum(pod["trace"] == trace for pod in pods) for trace in ("default", "gpuspec33")] == [300, 300]
    assert {pod["num_gpu"] for pod in pods} == {"0", "1", "2", "4", "8"}
    assert all(model in MODELS for pod in pods for model in pod["gpu_spec"].split("|") if model)
