"""What a request says to its driver: one struct for each driver of moorage, and one check for all of them.

`driver_config` has an object for each driver, by its name. The block of the job's driver is read and checked; all
others are ignored. The block of a driver that is not moorage's own is checked by its worker alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from moorage.schemas.capabilities import Capabilities
from moorage.schemas.gpu import GPUS_PER_REPLICA_MAX, GpuSpec
from moorage.schemas.names import CDI_UUID, SIMULATED_UUID
from moorage.schemas.nearest import nearest
from moorage.schemas.trouble import Trouble, quoted
from moorage.schemas.units import many

#: characters of a device's id
ID_CHARS_MAX: Final = 256
#: ports of one container
PORTS_MAX: Final = 16
#: largest /dev/shm of a container: 4 TiB
SHM_MIB_MAX: Final = 1 << 22
#: the keys of a block that list devices: the first is moorage's own word
DEVICE_KEYS: Final = ("gpu_device_ids", "cdi_devices", "device_ids")
#: where the interim form of OpenShell's request lists them
INTERIM: Final = "resource_requirements.gpu.device_ids"
_PCI: Final = r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]"
_ADDRESS: Final = re.compile(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])")
_UUID_KINDS: Final = ("gpu-", "mig-", SIMULATED_UUID.lower(), CDI_UUID.lower())
_ANY_ID: Final = re.compile(r".+", re.DOTALL)
#: no CDI name
_HOST_ID: Final = re.compile(r"(?![A-Za-z0-9._-]+/[A-Za-z0-9_-]+=).+", re.DOTALL)
_VM_ID: Final = re.compile(rf"|[0-9]+|{_PCI}")


class Block(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A base class for what a request may say to one driver, in `driver_config.<name of the driver>`.

    The class variables say how a request names exact devices for that driver.
    """

    #: the pattern of an id, and the same in words; None: no worker with this driver can give an exact device
    ids: ClassVar[re.Pattern[str] | None] = None
    ids_are: ClassVar[str] = "none"
    #: whether an id may be a number, or empty, which is any device
    loose: ClassVar[bool] = False
    #: most GPUs of one replica
    gpus_max: ClassVar[int] = GPUS_PER_REPLICA_MAX


class _Devices(Block, frozen=True, kw_only=True, omit_defaults=True):
    """The exact devices that a job wants. The three keys mean the same, and only one of them may be set."""

    gpu_device_ids: list[Any] | None = None
    cdi_devices: list[Any] | None = None
    device_ids: list[Any] | None = None


class ProcessBlock(_Devices, frozen=True, kw_only=True, omit_defaults=True):
    """The block of the driver `process`. A device is named by its uuid or index."""

    ids, ids_are = _HOST_ID, "a uuid or an index"


class NoopBlock(ProcessBlock, frozen=True, kw_only=True, omit_defaults=True):
    """The block of the driver `noop`, which runs nothing and leases devices as `process` does."""


class HandlerBlock(ProcessBlock, frozen=True, kw_only=True, omit_defaults=True):
    """The block of the driver `handler`, which calls a function of a service."""

    input: Any = None  # the function's input: any JSON value


class _Image(_Devices, frozen=True, kw_only=True, omit_defaults=True):
    """An image, and the devices that a job wants."""

    image: str | None = None  # container or VM image, in place of `run.image`


class DockerBlock(_Image, frozen=True, kw_only=True, omit_defaults=True):
    """The block of the driver `docker`. A device has a CDI name, such as `nvidia.com/gpu=0`; its uuid or index is
    accepted, too."""

    ids, ids_are = _ANY_ID, "a CDI name, a uuid or an index"

    ports: list[int] | None = None  # the container's own TCP ports that can be reached from outside of its host
    #: size of the container's /dev/shm in MiB; it counts as memory of the job. null: the worker's setting
    shm_mib: int | None = None


class PodmanBlock(DockerBlock, frozen=True, kw_only=True, omit_defaults=True):
    """The block of the driver `podman`, with the keys of docker's."""


class VmBlock(_Image, frozen=True, kw_only=True, omit_defaults=True):
    """The block of the driver `vm`. A virtual machine has one device, named by its index (also as a number) or its PCI
    address."""

    ids, ids_are = _VM_ID, 'an index, a PCI address as 0000:17:00.0, or ""'
    loose = True
    gpus_max = 1


class KubernetesBlock(_Image, frozen=True, kw_only=True, omit_defaults=True):
    """The block of the driver `kubernetes`. The cluster chooses the devices: ids are read as any driver's, and no
    worker supports them."""


#: by driver: those of moorage, also where no release has built them yet
BLOCKS: Final[Mapping[str, type[Block]]] = {
    "process": ProcessBlock,
    "noop": NoopBlock,
    "handler": HandlerBlock,
    "docker": DockerBlock,
    "podman": PodmanBlock,
    "vm": VmBlock,
    "kubernetes": KubernetesBlock,
}


#: the drivers whose jobs need the image of a container
_CONTAINERS: Final = ("docker", "podman", "kubernetes")
#: names of images as engines accept them: any other text could turn the request to the engine into another one
_IMAGE: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(?::[0-9]+)?(?:[/][A-Za-z0-9._-]+)*(?::[A-Za-z0-9._-]+)?(?:@sha256:[0-9a-f]{64})?"
)


class Fault(NamedTuple):
    """What is wrong with a block. `code` is invalid-argument for a wrong shape, failed-precondition for what a driver
    does not support."""

    code: str
    trouble: Trouble


def is_id(text: str) -> bool:
    """Return whether a text can be the id of a device: not blank, and not too long."""
    return bool(text.strip()) and len(text) <= ID_CHARS_MAX


def canonical_id(text: str) -> str:
    """Return the one spelling of an id: a plain number, a PCI address in lower case with four digits of its domain, a
    uuid as NVML writes it (`GPU-` and lower case), any other id in lower case. A CDI name is returned unchanged,
    because its letter case matters."""
    if text.isascii() and text.isdecimal():
        return str(int(text))
    if _HOST_ID.fullmatch(text) is None:
        return text
    lower, address = text.lower(), _ADDRESS.fullmatch(text)
    if address is not None:
        return f"{address[1].lstrip('0').zfill(4)}:{address[2]}".lower()
    return lower[:3].upper() + lower[3:] if lower.startswith(_UUID_KINDS) else lower


def takes_image(driver: str) -> bool:
    """Return whether a driver may run an image. For a driver that moorage does not know, this is True."""
    block = BLOCKS.get(driver)
    return block is None or "image" in block.__struct_fields__


def image_trouble(driver: str, image: str, field: str) -> Trouble | None:
    """Return what is wrong with a request's image ("" for none) for a driver that runs containers; None if nothing is,
    or for another driver. `field` is where the request names it."""
    if driver not in _CONTAINERS:
        return None
    if not image:
        return Trouble(field, f"a job of the driver {driver} needs an image", "null", "the name of an image")
    if not _IMAGE.fullmatch(image):
        allowed = "NAME, NAME:TAG or NAME@sha256:DIGEST"
        return Trouble(field, "this is not an image name", quoted(image), allowed)
    return None


def takes_ids(driver: str) -> bool:
    """Return whether a driver can give the devices that a request names; True for one that moorage does not know."""
    return BLOCKS.get(driver, DockerBlock).ids is not None


def no_ids(driver: str) -> str:
    """Return the error message for a driver that cannot give the devices that a request names."""
    return f"the driver {driver} gives no exact devices: its cluster chooses them"


def keys_fault(driver: str, block: object, keys: Sequence[str]) -> Fault | None:
    """Return the fault of a block that is no object or has a key outside `keys`; None if there is none."""
    place = f"driver_config.{driver}"
    if not isinstance(block, dict):
        return _shape(place, f"{place} must be an object", "null" if block is None else block, "an object")
    for key in block:
        if key not in keys:
            near, field = nearest(key, keys), f"{place}.{key[:80]}"
            hint = f"; the nearest is {near}" if near else f" (it reads: {', '.join(keys) or 'nothing'})"
            return _shape(field, f"the driver {driver} reads no {field}{hint}", key[:80], ", ".join(keys))
    return None


def block_fault(driver: str, block: object) -> Fault | None:
    """Return why the block of a driver cannot be read; None if it can, or if moorage does not know the driver."""
    kind = BLOCKS.get(driver)
    if kind is None:
        return None
    if (fault := keys_fault(driver, block, kind.__struct_fields__)) is not None:
        return fault
    assert isinstance(block, dict)
    place = f"driver_config.{driver}"
    for key, value in block.items():
        field = f"{place}.{key}"
        if key in DEVICE_KEYS and (fault := _list_fault(kind, field, value)) is not None:
            return fault
        if key == "ports" and (fault := _ports_fault(field, value)) is not None:
            return fault
        if key == "shm_mib" and value is not None and not (type(value) is int and 1 <= value <= SHM_MIB_MAX):
            return _shape(field, "shm_mib is the size of /dev/shm in MiB", quoted(str(value)), f"1..{SHM_MIB_MAX}")
        if key == "image" and value is not None and not (isinstance(value, str) and value.strip()):
            return _shape(field, "image must name an image", quoted(str(value)), "the name of an image")
    given = [key for key in DEVICE_KEYS if block.get(key) is not None]
    if len(given) > 1:
        return _twice(f"{place}.{given[1]}", f"{place}.{given[0]}")
    return None


def _list_fault(kind: type[Block], field: str, value: object) -> Fault | None:
    """Return the fault of a list of devices: it is no list, empty or too long, or has an invalid id; None for none."""
    name, allowed = field.rpartition(".")[2], f"1..{GPUS_PER_REPLICA_MAX} ids"
    if value is None:
        return None
    if not isinstance(value, list):
        return _shape(field, f"{name} must be a list of ids", type(value).__name__, allowed)
    if not value or len(value) > GPUS_PER_REPLICA_MAX:
        return _shape(field, f"{name} must list {allowed}", len(value), f"{allowed}; leave it out for any device")
    for at, one in enumerate(value):
        if kind.loose and (one == "" or (type(one) is int and one >= 0)):
            continue
        if not isinstance(one, str):
            return _shape(f"{field}[{at}]", "an id is text", type(one).__name__, "text")
        if not one.strip():
            return _shape(f"{field}[{at}]", "an id must not be blank", quoted(one), f"1..{ID_CHARS_MAX} characters")
        if len(one) > ID_CHARS_MAX:
            message = f"an id may have at most {ID_CHARS_MAX} characters"
            return _shape(f"{field}[{at}]", message, f"{len(one)} characters", f"1..{ID_CHARS_MAX} characters")
    return None


def _ports_fault(field: str, value: object) -> Fault | None:
    """Return the fault of a list of ports: its shape or length, an invalid port, or one named twice; None for none."""
    allowed = f"1..{PORTS_MAX} numbers from 1 to 65535, each once"
    if value is None:
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= PORTS_MAX:
        return _shape(field, "ports must list TCP ports of the container", quoted(str(value)), allowed)
    for at, one in enumerate(value):
        if type(one) is not int or not 0 < one < 1 << 16 or one in value[:at]:
            return _shape(f"{field}[{at}]", "this is not a port, or it is named twice", quoted(str(one)), allowed)
    return None


def devices_asked(driver: str, block: object, interim: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return where the devices are named (a path without `$.`), and their ids as text; INTERIM and `interim` if the
    block names none."""
    if isinstance(block, dict) and driver in BLOCKS:
        for key in DEVICE_KEYS:
            if isinstance(block.get(key), list):
                return f"driver_config.{driver}.{key}", tuple(str(one) for one in block[key])
    return INTERIM, tuple(interim)


def check(
    driver: str,
    block: object,
    gpu: GpuSpec | None,
    capabilities: Capabilities | None = None,
    interim: Sequence[str] = (),
) -> Fault | None:
    """Return the first fault in what a request says to its driver, or None.

    `block` is `driver_config.<driver>`, or UNSET if there is none; `gpu` is what the request asks of GPUs; `interim`
    are the ids of `resource_requirements`. With `capabilities`, something that the driver does not support is a fault
    as well. The faults are checked in this order: a block that cannot be read, devices named in two places, a driver
    without GPUs, too many GPUs for the driver, ids of a wrong shape, a driver that takes no ids.
    """
    if block is not msgspec.UNSET and (fault := block_fault(driver, block)) is not None:
        return fault
    place, ids = devices_asked(driver, block, interim)
    if place != INTERIM and interim:
        return _twice(INTERIM, place)
    if gpu is not None and capabilities is not None and not capabilities.gpu_enabled:
        message = f"the driver {driver} has no GPU support here"
        return _unsupported("gpu", message, f"{gpu.count} GPUs", "no GPU")
    kind = BLOCKS.get(driver, DockerBlock)  # of a driver that moorage does not know: any id
    if gpu is not None and gpu.count > kind.gpus_max:
        return _shape("gpu.count", f"the driver {driver} gives {kind.gpus_max} GPU", gpu.count, str(kind.gpus_max))
    fault = _ids_fault(driver, kind, place, ids, gpu) if ids else None
    if fault is None and ids and kind.ids is None and capabilities is not None:
        return _unsupported(place, no_ids(driver), ", ".join(ids), "a count of GPUs, without ids")
    return fault


def _ids_fault(driver: str, kind: type[Block], place: str, ids: tuple[str, ...], gpu: GpuSpec | None) -> Fault | None:
    """Return the fault of ids: duplicates, ids without a GPU, another number than `count`, or ids of a form that the
    driver does not know; None if there is none."""
    known = [canonical_id(one) for one in ids]
    for at, one in enumerate(known):
        if one in known[:at]:
            return _shape(place, f"the device {one} is named twice", one, "each device once")
    if gpu is None:
        return _shape(place, f"{place} needs a GPU request", ", ".join(ids), "ids beside gpu alone")
    if gpu.count != len(ids):
        message = f"{place} lists {many(len(ids), 'device')}, and the count of GPUs is {gpu.count}"
        return _shape(place, message, len(ids), f"{gpu.count}, or as many in gpu.count")
    for one in ids:
        if kind.ids is not None and not kind.ids.fullmatch(one):
            return _shape(place, f"the driver {driver} knows no device {one}", one, kind.ids_are)
    return None


def _shape(field: str, message: str, found: object, allowed: str) -> Fault:
    return Fault("invalid-argument", Trouble(field, message, found, allowed))


def _unsupported(field: str, message: str, found: object, allowed: str) -> Fault:
    return Fault("failed-precondition", Trouble(field, message, found, allowed))


def _twice(field: str, other: str) -> Fault:
    return _shape(field, f"{field} and {other} say the same: send one of them", "both", "one of them")
