"""One CDI spec, of YAML or JSON, as far as moorage needs it: which devices it names, and their files in /dev.

Source: the Container Device Interface specification. Everything else in a file, its version and its faults are the
engine's to judge: engines differ in what they refuse, and a container that one refuses is a fault of that host.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

#: an alias stands for all of its anchor's value once more
ALIASES_MAX: Final = 16


class CdiError(ValueError):
    """A spec that cannot be used, or names that are in no spec."""


class DeviceNode(msgspec.Struct, frozen=True, rename="camel"):
    path: str
    host_path: str = ""


class Edits(msgspec.Struct, frozen=True, rename="camel"):
    """The device nodes that a container gets."""

    device_nodes: list[DeviceNode] | None = None

    @property
    def nodes(self) -> list[DeviceNode]:
        return self.device_nodes or []


class SpecDevice(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    container_edits: Edits


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """One file. A container that gets any of its devices also gets its `container_edits`."""

    kind: str
    devices: list[SpecDevice]
    container_edits: Edits | None = None


def parse(raw: bytes) -> Spec:
    """Return the spec of a text of YAML or JSON. Raises CdiError."""
    try:
        spec = msgspec.convert(_value_of(raw), Spec)
    except msgspec.ValidationError as error:
        raise CdiError(f"it is no CDI spec: {error}") from None
    vendor, _, of_class = spec.kind.partition("/")
    if not vendor or not of_class:
        raise CdiError(f"kind {spec.kind[:80]!r} is no vendor and class, such as nvidia.com/gpu")
    if not spec.devices:
        raise CdiError("it has no devices")
    names: set[str] = set()
    for name in (device.name for device in spec.devices):
        if name in names:
            raise CdiError(f"the device {name[:80]} is there twice")
        names.add(name)
    return spec


def _value_of(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        pass  # YAML reads most of JSON, too, but not tabs between its words
    import yaml  # imported late, because most workers have no specs

    if raw.count(b"*") > ALIASES_MAX:
        raise CdiError(f"it has more than {ALIASES_MAX} aliases")
    try:
        # every scalar is a text, as it is written: a device may be called 0 or 1:0. Written in Python, so that a text
        # with many brackets is an error and ends no process
        return next(yaml.load_all(raw, yaml.BaseLoader), None)  # engines read the first document
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CdiError(f"no YAML: {error}") from None
    except RecursionError:
        raise CdiError("it is nested too deep") from None
