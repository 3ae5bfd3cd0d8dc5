"""Find the DRM render nodes of a machine in sysfs: what each one is, and which files have its readings.

Sources: the kernel's documents on amdgpu (driver-misc, thermal), on the xe driver's frequencies, and on KFD's topology;
ROCm's page on GPU isolation. All paths are below a root, so that tests can make one up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moorage.schemas.frames import Device
from moorage.worker.devices.readers.drm_names import clean_name, pci_names

NODES_MAX: Final = 256
FILES_MAX: Final = 64
_MIB: Final = 1024 * 1024
_VENDORS: Final = {0x1002: "amd", 0x8086: "intel"}
_NVIDIA: Final = 0x10DE
_WORDS: Final = {"amd": "AMD", "intel": "Intel"}
UNKNOWN: Final = "unknown"
_VENDOR_ORDER: Final = ("amd", "intel", "apple", UNKNOWN)
_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
#: Drivers of devices that are no GPUs of their own: software devices, devices of a virtual machine, or (amdgpu_xcp) a
#: partition of a device that is already listed.
_NO_GPU: Final = frozenset(
    {"vgem", "vkms", "virtio_gpu", "virtio-pci", "vmwgfx", "bochs-drm", "qxl", "hyperv_drm", "vboxvideo", "amdgpu_xcp"}
)


@dataclass(frozen=True, slots=True)
class Card:
    """One render node. `folder` is its device in sysfs; the other paths are files that a reading uses.

    `address` is the PCI address in the form of sysfs, empty for other buses. `frequencies` are pairs of (current,
    maximum); `vram_used` is None if there is no such file.
    """

    device: Device
    folder: Path
    address: str
    render_minor: int
    nodes: frozenset[str]
    busy_percent: Path | None = None
    vram_used: Path | None = None
    vram_available: Path | None = None
    temperature: Path | None = None
    power: Path | None = None
    power_limit: Path | None = None
    errors: tuple[Path, ...] = ()
    frequencies: tuple[tuple[Path, Path], ...] = field(default=())


@dataclass(slots=True)
class _Found:
    """A render node before it becomes a card."""

    minor: int
    folder: Path
    vendor: str
    pci_id: tuple[int, int] | None
    address: str
    uevent: dict[str, str]
    order: tuple[int, ...] = ()
    index: int = 0


def find_cards(root: Path, listed: Container[str] = ()) -> tuple[list[Card], list[str]]:
    """Return the cards of the machine under `root` in slot order, and a line for each node that cannot be used.

    Slot order is amd, intel, apple, unknown; within a vendor by index, as that vendor's runtime counts: for AMD the
    position in KFD's topology, for the others the order of PCI addresses. Left out silently are nodes at an address in
    `listed` (NVML has them), nodes that are no GPUs of their own, and nodes whose file is not in `dev/dri`: in a
    container sysfs shows the host's devices too.
    """
    faults: list[str] = []
    found: list[_Found] = []
    for minor in _render_minors(root):
        if not (root / "dev/dri" / f"renderD{minor}").exists():
            continue
        each = _look_at(root, minor)
        if each is None:
            faults.append(f"renderD{minor}: its device cannot be read")
        elif each.uevent.get("DRIVER") in _NO_GPU or (each.address and each.address in listed):
            continue
        elif each.pci_id is not None and each.pci_id[0] == _NVIDIA and each.uevent.get("DRIVER") == "nvidia":
            # NVML lists these; a device that NVML leaves out has failed, and must not come back as another kind of
            # device
            faults.append(f"renderD{minor}: {each.address} has NVIDIA's driver, and NVML does not list it")
        else:
            found.append(each)
    _number(found, root)
    found.sort(key=lambda each: (_VENDOR_ORDER.index(each.vendor), each.index))
    names = pci_names((each.pci_id for each in found if each.pci_id), root)
    uuids = Counter(_unique_id(each) for each in found)
    return [_card(each, names, uuids, root) for each in found], faults


# ----------------------------------------------------------------------------------------------- what a node is


def _render_minors(root: Path) -> list[int]:
    try:
        names = [path.name.removeprefix("renderD") for path in (root / "sys/class/drm").glob("renderD*")]
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdigit())[:NODES_MAX]


def _look_at(root: Path, minor: int) -> _Found | None:
    try:
        folder = (root / f"sys/class/drm/renderD{minor}/device").resolve(strict=True)
    except OSError:
        return None
    uevent = dict(line.split("=", 1) for line in read(folder / "uevent").splitlines() if "=" in line)
    vendor_id, device_id = _hex(folder / "vendor"), _hex(folder / "device")
    address = uevent.get("PCI_SLOT_NAME", folder.name).lower()
    if vendor_id is None or device_id is None or not _PCI_ADDRESS.fullmatch(address):
        apple = uevent.get("OF_COMPATIBLE_0", "").startswith("apple,")
        return _Found(minor, folder, "apple" if apple else UNKNOWN, None, "", uevent)
    return _Found(minor, folder, _VENDORS.get(vendor_id, UNKNOWN), (vendor_id, device_id), address, uevent)


def _number(found: list[_Found], root: Path) -> None:
    """Give every node its index within its vendor, as in that vendor's own variable."""
    topology = {minor: place for place, (minor, _) in enumerate(kfd_gpus(root))}
    for vendor in _VENDOR_ORDER:
        own = [each for each in found if each.vendor == vendor]
        own.sort(key=lambda each: (tuple(int(part, 16) for part in re.split(r"[:.]", each.address or "0")), each.minor))
        if vendor != "amd":
            for index, each in enumerate(own):
                each.index = index
            continue
        for each in own:  # ROCm counts every GPU of KFD, even without a file in our /dev
            if each.minor in topology:
                each.index = topology[each.minor]
        # ROCm cannot use the others: they get the last numbers
        for place, each in enumerate((each for each in own if each.minor not in topology), len(topology)):
            each.index = place


def kfd_gpus(root: Path) -> list[tuple[int, str]]:
    """Return (render minor, gfx target) of the GPUs that ROCm sees, in its order; the target is "" if KFD has none."""
    gpus = []
    folder = root / "sys/class/kfd/kfd/topology/nodes"
    try:
        nodes = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())[:NODES_MAX]
    except OSError:
        return []
    for node in nodes:
        lines = (line.split() for line in read(folder / str(node) / "properties").splitlines())
        values = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
        if values.get("simd_count") and values.get("drm_render_minor"):
            version = values.get("gfx_target_version", 0)
            target = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""
            gpus.append((values["drm_render_minor"], target))
    return gpus


def _unique_id(found: _Found) -> str:
    """Return an AMD device's id as ROCm prints it: GPU- and 16 hex digits; empty if it has none, or is not AMD's."""
    if found.vendor != "amd":
        return ""
    text = read(found.folder / "unique_id").lower().removeprefix("0x")
    return f"GPU-{text.zfill(16)}" if re.fullmatch(r"[0-9a-f]{1,16}", text) and int(text, 16) else ""


def _card(found: _Found, names: dict[tuple[int, int], str], uuids: Counter[str], root: Path) -> Card:
    folder = found.folder
    unique = _unique_id(found)
    device = Device(
        index=found.index,
        vendor=found.vendor,
        name=_name(found, names),
        # two functions of one card may report the same number, which then identifies neither
        uuid=unique if unique and uuids[unique] == 1 else found.address or f"{folder.name}-{found.minor}",
        memory_mib=_memory_bytes(found) // _MIB,
        pci=_long_address(found.address),
        numa=_numa(folder),
        compute=dict(kfd_gpus(root)).get(found.minor, "") if found.vendor == "amd" else "",
    )
    return Card(
        device,
        folder,
        found.address,
        found.minor,
        frozenset({f"renderD{found.minor}", *(path.name for path in _drm_folders(folder))}),
        busy_percent=_there(folder / "gpu_busy_percent"),
        vram_used=_there(folder / "mem_info_vram_used"),
        vram_available=next((path / "lmem_avail_bytes" for path in _drm_folders(folder) if _lmem(path)), None),
        temperature=_temperature(folder),
        power=_first(folder, _POWER_FILES),
        power_limit=_first(folder, _POWER_LIMIT_FILES),
        errors=tuple(sorted(folder.glob("ras/*_err_count"))[:FILES_MAX]),
        frequencies=tuple(_frequencies(folder)[:FILES_MAX]) if found.vendor == "intel" else (),
    )


def _name(found: _Found, names: dict[tuple[int, int], str]) -> str:
    if found.vendor == "amd" and (product := clean_name(read(found.folder / "product_name"))):
        return product  # reported by the board itself; server cards have it
    if found.pci_id is None:
        compatible = found.uevent.get("OF_COMPATIBLE_0") or found.uevent.get("DRIVER") or found.folder.name
        return clean_name(compatible)
    word = _WORDS.get(found.vendor, "PCI")
    named = names.get(found.pci_id)
    return clean_name(f"{word} {named}" if named else "{} {:04x}:{:04x}".format(word, *found.pci_id))


def _long_address(address: str) -> str:
    """Return a PCI address in NVML's form, so that frames have one form: eight digits of domain, upper case."""
    domain, colon, rest = address.partition(":")
    return f"{domain.zfill(8)}:{rest}".upper() if colon else ""


def _numa(folder: Path) -> int:
    text = read(folder / "numa_node")
    return int(text) if text.lstrip("-").isdigit() else -1


# ------------------------------------------------------------------------------------ memory, and what tells readings


def _memory_bytes(found: _Found) -> int:
    """Return the bytes of the device's own memory; 0 if no file has them, as on Intel's integrated devices.

    On AMD's integrated devices they are what the firmware reserved of the host's memory. Some releases of xe have them
    by tile, and Intel's own i915 has them in its card folders.
    """
    if found.vendor == "amd":
        return number(found.folder / "mem_info_vram_total") or 0
    if found.vendor == "intel":
        tiles = [number(path) or 0 for path in sorted(found.folder.glob("tile*/physical_vram_size_bytes"))]
        return sum(tiles) or sum(number(path / "lmem_total_bytes") or 0 for path in _drm_folders(found.folder))
    return 0


def _drm_folders(folder: Path) -> list[Path]:
    """Return the device's card folders, such as card0: i915 keeps its files there."""
    return sorted(folder.glob("drm/card[0-9]*"))


def _lmem(card: Path) -> bool:
    return (card / "lmem_avail_bytes").exists() and (card / "lmem_total_bytes").exists()


def _temperature(folder: Path) -> Path | None:
    """Return the file of the chip's sensor: edge on amdgpu, pkg on xe; else the hottest spot, else the first sensor.

    None without a sensor.
    """
    sensors = sorted(folder.glob("hwmon/hwmon*/temp*_input"), key=lambda path: (path.parent.name, len(path.name), path))
    by_label = {read(path.with_name(path.name.replace("_input", "_label"))): path for path in reversed(sensors)}
    for label in ("edge", "pkg", "junction"):
        if label in by_label:
            return by_label[label]
    return sensors[0] if sensors else None


#: microwatts that the device draws, as a mean or now, and that it may draw at most: amdgpu, and some have one of a kind
_POWER_FILES: Final = ("power1_average", "power1_input")
_POWER_LIMIT_FILES: Final = ("power1_cap", "power1_max")


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of these files that a sensor of the device has."""
    return next((path for name in names for path in sorted(folder.glob(f"hwmon/hwmon*/{name}"))), None)


#: (current, maximum) of a GT's frequency below a folder: xe, i915, and older i915 without folders for GTs
_FREQUENCY_FILES: Final = (
    ("tile*/gt*/freq0", "act_freq", "max_freq"),
    ("drm/card[0-9]*/gt/gt*", "rps_act_freq_mhz", "rps_max_freq_mhz"),
    ("drm/card[0-9]*", "gt_act_freq_mhz", "gt_max_freq_mhz"),
)


def _frequencies(folder: Path) -> list[tuple[Path, Path]]:
    for pattern, current, most in _FREQUENCY_FILES:
        pairs = [(path / current, path / most) for path in sorted(folder.glob(pattern)) if (path / current).exists()]
        if pairs:
            return pairs
    return []


# ------------------------------------------------------------------------------------------------------------ files


def read(path: Path) -> str:
    """Return the stripped text of a file of sysfs; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """Return the decimal number in a file; None if there is none."""
    text = read(path)
    return int(text) if text.lstrip("-").isdigit() else None


def _hex(path: Path) -> int | None:
    try:
        return int(read(path), 16)
    except ValueError:
        return None


def _there(path: Path) -> Path | None:
    return path if path.exists() else None
