"""The hosts and the requests of the demo: drawn from the trace of a real cluster, with a few jobs that test one thing
each."""

from __future__ import annotations

import csv
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.frames import Device
from moorage.schemas.gpu import model_matches
from moorage.system.simulated_hosts import MODELS, SimulatedHost, openb_hosts

DATA: Final = Path(__file__).resolve().parent / "openb"
GANG_RANKS: Final = 4


class Planned(msgspec.Struct):
    """A request, how its job should end (`expect`), and how many processes should be started for it in all (`runs`)."""

    name: str
    request: dict[str, Any]
    expect: str
    runs: int = 1


def hosts(count: int, seed: int) -> list[SimulatedHost]:
    """Return `count` hosts of 40 that `seed` draws from the trace: first the largest one of each model, then others.

    With a `count` below the number of models, some models are missing; there are never more than 40.
    """
    drawn = openb_hosts(DATA / "nodes_sample.csv", 40, seed)
    chosen: list[SimulatedHost] = []
    names: set[str] = set()
    for host in sorted(drawn, key=lambda host: -len(host.devices)):  # the largest host of each model first
        if host.devices and host.devices[0].name not in names:
            names.add(host.devices[0].name)
            chosen.append(host)
    for host in drawn:
        if len(chosen) < count and host not in chosen:
            chosen.append(host)
    return chosen[:count]


def fleet_file(hosts_: list[SimulatedHost]) -> bytes:
    """Return the hosts as the file that `moorage worker --simulate` reads."""
    entries = [
        {"name": h.name, "device": list(h.devices), "cpu_milli": h.cpu_milli, "memory_mib": h.memory_mib}
        for h in hosts_
    ]
    return msgspec.json.encode({"host": entries})


def planned(fleet: list[SimulatedHost], count: int, seed: int, record: Path) -> Iterator[Planned]:
    """Yield `count` requests of the trace that some host of the fleet can run, then the jobs that test one thing
    each."""
    rows = list(csv.DictReader((DATA / "pods_sample.csv").read_text().splitlines()))
    source = random.Random(seed)
    source.shuffle(rows)
    made = 0
    for number, row in enumerate(rows * (count // len(rows) + 2)):
        request = _from_trace(row, f"pod-{number:04d}", record)
        if any(_could_run(host, request) for host in fleet):
            yield Planned(str(request["job"]), request, "SUCCEEDED")
            made += 1
        if made == count:
            break
    yield from _with_a_purpose(record)


def _from_trace(row: dict[str, str], job: str, record: Path) -> dict[str, Any]:
    gpus, milli = int(row["num_gpu"]), int(row["gpu_milli"])
    lived_s = max(1.0, float(row["deletion_time"] or 0) - float(row["scheduled_time"] or 0))
    hold_s = round(0.02 + 0.03 * math.log10(lived_s), 3)  # months become a sixth of a second
    request: dict[str, Any] = {
        "job": job,
        "resources": {"cpu_milli": int(row["cpu_milli"]), "memory_mib": int(row["memory_mib"])},
        "run": _run(record, hold_s, gpus, "ok"),
        "events": "tenant",
    }
    if gpus:
        gpu: dict[str, Any] = {"count": gpus}
        models = [f"={MODELS[word].name}" for word in row["gpu_spec"].split("|") if word in MODELS]
        if models:
            gpu["model"] = models
        if milli < 1000:  # a share of one device, which the trace tells in thousandths
            smallest = min((_memory(model) for model in models), default=15109)
            gpu["sharing"] = "time-slice"
            gpu["share"] = {"memory_mib": smallest * milli // 1000, "compute_percent": max(1, milli // 10)}
        request["gpu"] = gpu
    return request


def _memory(pattern: str) -> int:
    return next(model.memory_mib for model in MODELS.values() if f"={model.name}" == pattern)


def _run(record: Path, hold_s: float, gpus: int, kind: str) -> dict[str, Any]:
    return {"argv": ["/bin/sh", str(DATA / "job.sh"), str(record), str(hold_s), str(gpus), kind], "timeout_s": 60}


def _could_run(host: SimulatedHost, request: dict[str, Any]) -> bool:
    gpu, resources = request.get("gpu"), request["resources"]
    if resources["cpu_milli"] > host.cpu_milli or resources["memory_mib"] > host.memory_mib:
        return False
    if gpu is None:
        return True
    count: int = gpu["count"]
    return sum(_answers(device, gpu) for device in host.devices) >= count


def _answers(device: Device, gpu: dict[str, Any]) -> bool:
    if device.vendor != "nvidia" or device.memory_mib < gpu.get("share", {}).get("memory_mib", 0):
        return False
    return not gpu.get("model") or any(model_matches(pattern, device.name) for pattern in gpu["model"])


def _with_a_purpose(record: Path) -> Iterator[Planned]:
    one = {"count": 1}
    gang = {"argv": [sys.executable, str(DATA / "gang.py"), str(record)], "timeout_s": 60}
    yield Planned(
        "gang",
        {"job": "gang", "replicas": GANG_RANKS, "gpu": {"scheduling": "gang"}, "run": gang},
        "SUCCEEDED",
        GANG_RANKS,
    )
    yield Planned(
        "flaky", {"job": "flaky", "gpu": one, "retries": 2, "run": _run(record, 0.05, 1, "flaky")}, "SUCCEEDED", 2
    )
    yield Planned(
        "poison", {"job": "poison", "gpu": one, "retries": 2, "run": _run(record, 0.05, 1, "poison")}, "FAILED", 3
    )
    yield Planned(
        "endless", {"job": "endless", "gpu": one, "run": _run(record, 600, 1, "ok") | {"timeout_s": 900}}, "CANCELLED"
    )
    yield Planned(
        "impossible",
        {
            "job": "impossible",
            "gpu": {"model": "=NOSUCH9000"},
            "on_no_match": "reject",
            "run": _run(record, 0, 1, "ok"),
        },
        "REFUSED",
        0,
    )
