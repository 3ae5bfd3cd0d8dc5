"""Make the hosts of a simulated fleet, from a word, a file, or the node list of a trace.

A fleet is a word::

    fleet  = hosts { "+" hosts }                 4x8xH100+2x4xL40S     six hosts
    hosts  = [ NUMBER "x" ] host                 4x8xH100              four hosts alike
    host   = "cpu" | group { "," group }         2xL40S,6xA100         one host with two models
    group  = NUMBER "x" MODEL [ ":" SIZE ]       8xH100
    SIZE   = NUMBER ( "G" | "M" )                1e9 bytes, or MiB; an unknown model needs one

`4x8xH100` is hosts x GPUs x model and `8xH100` is one host. A TOML or JSON file allows more; see `load_hosts`.
"""

from __future__ import annotations

import csv
import random
import re
import uuid
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.frames import Device
from moorage.schemas.gpu import UNITS
from moorage.schemas.names import SIMULATED_UUID, worker_slug

HOSTS_MAX: Final = 100_000
GPUS_PER_HOST_MAX: Final = 64
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
CPU_MILLI_PER_GPU: Final = 12_000
MEMORY_MIB_PER_GPU: Final = 128 * 1024
CPU_HOST_MILLI: Final = 32_000
CPU_HOST_MEMORY_MIB: Final = 128 * 1024
_NAMESPACE: Final = uuid.UUID("5f0c3a4e-6f0e-5d6c-9f0a-8f1d3c7b2a90")


@dataclass(frozen=True, slots=True)
class SimulatedHost:
    """A simulated host. `name` is its worker id and seeds the uuids, so that it is the same machine each time."""

    name: str
    devices: tuple[Device, ...]
    cpu_milli: int
    memory_mib: int


class Model(msgspec.Struct, frozen=True):
    """What a driver reports for a model: its name, and its memory in MiB.

    `linked` says that all devices of the model on one host are linked, as by NVLink.
    """

    name: str
    memory_mib: int
    compute: str = ""
    linked: bool = False
    vendor: str = "nvidia"


#: The key is the word in a fleet, upper case. The openb trace hides what G2 and G3 are, and its publishers give no
#: sizes: theirs are our assumption.
MODELS: Final[dict[str, Model]] = {
    "P100": Model("Tesla P100-PCIE-16GB", 16280, "6.0"),
    "V100M16": Model("Tesla V100-SXM2-16GB", 16160, "7.0", linked=True),
    "V100M32": Model("Tesla V100-SXM2-32GB", 32510, "7.0", linked=True),
    "T4": Model("Tesla T4", 15109, "7.5"),
    "A10": Model("NVIDIA A10", 23028, "8.6"),
    "A100": Model("NVIDIA A100-SXM4-80GB", 81920, "8.0", linked=True),
    "A100-40G": Model("NVIDIA A100-SXM4-40GB", 40960, "8.0", linked=True),
    "A100-80G": Model("NVIDIA A100-SXM4-80GB", 81920, "8.0", linked=True),
    "L4": Model("NVIDIA L4", 23034, "8.9"),
    "L40S": Model("NVIDIA L40S", 46068, "8.9"),
    "H100": Model("NVIDIA H100 80GB HBM3", 81559, "9.0", linked=True),
    "H200": Model("NVIDIA H200", 143771, "9.0", linked=True),
    "MI300X": Model("AMD Instinct MI300X", 196592, "gfx942", linked=True, vendor="amd"),
    "G2": Model("Generic G2", 24576),
    "G3": Model("Generic G3", 40960, linked=True),
}

_GROUP: Final = re.compile(
    r"(?P<count>\d{1,6})x(?P<model>[A-Za-z][A-Za-z0-9_ .-]{0,62})(?::(?P<size>\d{1,9})(?P<unit>[A-Za-z]{1,3}))?"
)
_HOSTS: Final = re.compile(r"(?P<count>\d{1,9})x(?=\d+x|cpu$)")


# ------------------------------------------------------------------------------------------------------ a fleet's word


def named_hosts(word: str, name: str = "sim") -> list[SimulatedHost]:
    """Return the hosts of a fleet as `--simulate` names it, by its word or by its `.toml` or `.json` file.

    Raises ValueError for a wrong word or content, OSError for an unreadable file.
    """
    return load_hosts(Path(word)) if word.endswith((".toml", ".json")) else simulated_hosts(word, name)


def simulated_hosts(word: str, name: str = "sim", most: int = HOSTS_MAX) -> list[SimulatedHost]:
    """Return the hosts of a fleet's word, named `<name>-0000` and so on; the module's docstring has the grammar.

    Raises ValueError naming the wrong part, or for more than `most` hosts.
    """
    hosts: list[SimulatedHost] = []
    for part in word.replace(" ", "").split("+"):
        repeated = _HOSTS.match(part)
        count = int(repeated["count"]) if repeated else 1
        if not 1 <= count <= most - len(hosts):
            raise ValueError(f"a simulated fleet has 1..{most} hosts, found {len(hosts) + count} up to {part!r}")
        groups = parse_groups(part[repeated.end() :] if repeated else part)
        hosts += [build_host(f"{name}-{len(hosts) + number:04d}", groups) for number in range(count)]
    return hosts


def parse_groups(word: str) -> list[tuple[int, Model]]:
    """Return one host's groups: `2xL40S,6xA100` → [(2, L40S), (6, A100)]; `cpu` → [].

    Raises ValueError for any other text, an unknown model without a size, or too many GPUs.
    """
    if word == "cpu":
        return []
    groups: list[tuple[int, Model]] = []
    for part in word.split(","):
        found = _GROUP.fullmatch(part)
        if found is None:
            raise ValueError(f"not a simulated host: {part!r}; it looks like 8xH100, 2xL40S,6xA100, 2xNew:24G or cpu")
        size_mib = None
        if found["size"]:
            unit = UNITS.get(found["unit"].lower())
            if unit is None:
                raise ValueError(f"not a simulated host: {part!r}; the unit of memory is G, Gi or M")
            size_mib = int(int(found["size"]) * unit / (1 << 20))
        groups.append((int(found["count"]), _model(found["model"], size_mib)))
    total = sum(count for count, _ in groups)
    if not 1 <= total <= GPUS_PER_HOST_MAX or not all(count for count, _ in groups):
        raise ValueError(f"a simulated host has 1..{GPUS_PER_HOST_MAX} GPUs, found {total} in {word!r}; without: cpu")
    return groups


def _model(word: str, size_mib: int | None) -> Model:
    known = MODELS.get(word.upper())
    if known is None and size_mib is None:
        raise ValueError(f"unknown model {word!r}: say its memory, as {word}:24G, or take one of {', '.join(MODELS)}")
    if known is None:
        return Model(word, size_mib or 0)
    return known if size_mib is None else msgspec.structs.replace(known, memory_mib=size_mib)


def build_host(
    name: str, groups: Sequence[tuple[int, Model]], cpu_milli: int = 0, memory_mib: int = 0
) -> SimulatedHost:
    """Return a host with these groups in this order; cores and memory follow from its GPUs unless given."""
    models = [model for count, model in groups for _ in range(count)]
    devices = tuple(_device(name, index, models) for index in range(len(models)))
    gpus = len(devices)
    return SimulatedHost(
        worker_slug(name),
        devices,
        cpu_milli or (gpus * CPU_MILLI_PER_GPU if gpus else CPU_HOST_MILLI),
        memory_mib or (gpus * MEMORY_MIB_PER_GPU if gpus else CPU_HOST_MEMORY_MIB),
    )


def _device(host: str, index: int, models: Sequence[Model]) -> Device:
    model = models[index]
    return Device(
        index=index,
        vendor=model.vendor,
        name=model.name,
        uuid=f"{SIMULATED_UUID}{uuid.uuid5(_NAMESPACE, f'{host}/{index}')}",
        memory_mib=model.memory_mib,
        pci=f"00000000:{0x10 + index:02X}:00.0",
        numa=0 if 2 * index < len(models) else 1,
        compute=model.compute,
        peers=[other for other in range(len(models)) if other != index and models[other] == model]
        if model.linked
        else [],
    )


# ------------------------------------------------------------------------------------------------------------ files


class _HostEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "sim"
    count: int = 1
    gpus: str = "cpu"
    device: list[Device] = []
    cpu_milli: int = 0
    memory_mib: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= HOSTS_MAX:
            raise ValueError(f"count must be 1..{HOSTS_MAX}, found {self.count}")
        if len(self.device) > GPUS_PER_HOST_MAX:
            raise ValueError(f"device must list at most {GPUS_PER_HOST_MAX}, found {len(self.device)}")
        if self.device and self.gpus != "cpu":
            raise ValueError("gpus and device describe the same thing: give one of them")
        if self.device and self.count != 1:
            raise ValueError(f"count must be 1 with device, because a device is on one host, found {self.count}")


class _Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: list[_HostEntry] = []


def load_hosts(path: Path) -> list[SimulatedHost]:
    """Return the hosts in a `.json` file, or in a TOML file of any other suffix: `host` is a list of tables.

    Each has `name` (default sim), and `gpus` (one host's word, such as `2xL40S,6xA100`; default cpu) or `device`, a
    list of devices with hello's fields. With a `count` above 1, that many equal hosts get numbers after the name.
    `cpu_milli` and `memory_mib` are for each host. Raises ValueError for invalid content, OSError for an unreadable
    file.
    """
    with open(path, "rb") as file:
        text = file.read(FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX:
        raise ValueError(f"{path.name} has more than {FILE_BYTES_MAX} bytes")
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        fleet = decode(text.removeprefix(BOM_UTF8), type=_Fleet)
    except ValueError as error:  # msgspec's errors, and those of text that is not UTF-8
        raise ValueError(f"{path.name} is not the file of a fleet: {error}") from None
    hosts: list[SimulatedHost] = []
    for entry in fleet.host:
        if len(hosts) + entry.count > HOSTS_MAX:
            raise ValueError(f"a simulated fleet has at most {HOSTS_MAX} hosts")
        groups = parse_groups(entry.gpus)
        for number in range(entry.count):
            name = entry.name if entry.count == 1 else f"{entry.name}-{number:04d}"
            host = build_host(name, groups, entry.cpu_milli, entry.memory_mib)
            if entry.device:
                host = SimulatedHost(host.name, tuple(entry.device), host.cpu_milli, host.memory_mib)
            hosts.append(host)
    names = {host.name for host in hosts}
    if len(names) != len(hosts):
        raise ValueError(f"{path.name} names a host twice: every worker needs its own id")
    return hosts


def openb_hosts(sample_csv: Path, count: int, seed: int) -> list[SimulatedHost]:
    """Return `count` hosts of Alibaba's GPU cluster of 2023, drawn by `seed` from a node list of the trace.

    Columns `sn,cpu_milli,memory_mib,gpu,model`. Every row is drawn once before any is drawn again; a host drawn again
    has another name, and so other uuids. Raises ValueError for a count out of range, a file without rows, or a drawn
    row whose model is unknown or empty, as that of a host without GPUs.
    """
    if not 0 <= count <= HOSTS_MAX:
        raise ValueError(f"a simulated fleet has 0..{HOSTS_MAX} hosts, found {count}")
    with open(sample_csv, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{sample_csv.name} has no rows")
    source = random.Random(seed)
    drawn: list[SimulatedHost] = []
    while len(drawn) < count:
        again = len(drawn) // len(rows)
        for row in source.sample(rows, min(len(rows), count - len(drawn))):
            name = row["sn"] if not again else f"{row['sn']}-{again}"
            groups = [(int(row["gpu"]), _model(row["model"], None))]
            drawn.append(build_host(name, groups, int(row["cpu_milli"]), int(row["memory_mib"])))
    return drawn
