"""Make a spec of what a CDI file has, and refuse the whole file for what engines refuse it for.

Source: the Container Device Interface specification up to 1.1.0, and its library for Go, which the engines use. Fields
match without regard to case, null is as if left out, and a number or truth value is a text where a text is due. One
device with a fault costs all devices of its file.

A file of a version that is newer than `NEWEST` names its devices as others do: its other fields are the engine's to
judge, since an engine may know that version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from moorage.worker.devices.readers.cdi_yaml import YamlError, load, text_of

NAME_CHARS_MAX: Final = 256
VERSIONS: Final = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
NEWEST: Final = (1, 1, 0)

_VERSION: Final = re.compile(r"v?([0-9]+)\.([0-9]+)\.([0-9]+)")
_VENDOR: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]")
_CLASS: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]")
_NAME: Final = re.compile(r"[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9_.:-]*[A-Za-z0-9]")
_STAGES: Final = frozenset(
    ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
)  # fmt: skip
_NODE_TYPES: Final = frozenset(("", "b", "c", "u", "p"))


class CdiError(ValueError):
    """A spec that cannot be used, or names that are in no spec."""


class DeviceNode(msgspec.Struct, frozen=True, rename="camel"):
    path: str
    host_path: str = ""


class Edits(msgspec.Struct, frozen=True, rename="camel"):
    """The device nodes that a container gets."""

    device_nodes: list[DeviceNode] = []


class SpecDevice(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    container_edits: Edits


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """One file. A container that gets any of its devices also gets its `container_edits`."""

    kind: str
    devices: list[SpecDevice]
    container_edits: Edits = Edits()


# ---------------------------------------------------------------------------------------------------- what is where


@dataclass(frozen=True, slots=True)
class _Int:
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class _List:
    of: Any


class _Texts:
    """A mapping from texts to texts."""


_INT: Final = _Int(-(1 << 63), (1 << 63) - 1)
_UINT32: Final = _Int(0, (1 << 32) - 1)
_NODE: Final = {
    "path": str, "hostPath": str, "type": str, "major": _INT, "minor": _INT, "fileMode": _UINT32, "permissions": str,
    "uid": _UINT32, "gid": _UINT32,
}  # fmt: skip
_MOUNT: Final = {"hostPath": str, "containerPath": str, "options": _List(str), "type": str}
_HOOK: Final = {"hookName": str, "path": str, "args": _List(str), "env": _List(str), "timeout": _INT}
_RDT: Final = {
    "closID": str, "l3CacheSchema": str, "memBwSchema": str, "schemata": _List(str), "enableCMT": bool,
    "enableMBM": bool, "enableMonitoring": bool,
}  # fmt: skip
_EDITS: Final = {
    "env": _List(str), "deviceNodes": _List(_NODE), "hooks": _List(_HOOK), "mounts": _List(_MOUNT), "intelRdt": _RDT,
    "additionalGids": _List(_UINT32), "netDevices": _List({"hostInterfaceName": str, "name": str}),
}  # fmt: skip
_DEVICE: Final = {"name": str, "annotations": _Texts(), "containerEdits": _EDITS}
_SPEC: Final = {
    "cdiVersion": str, "kind": str, "annotations": _Texts(), "devices": _List(_DEVICE), "containerEdits": _EDITS,
}  # fmt: skip


def parse(raw: bytes) -> Spec:
    """Return the spec of a text of YAML or JSON. Raises CdiError."""
    try:
        value = load(raw)
    except YamlError as error:
        raise CdiError(str(error)) from None
    version = _version_of(value)
    found = _fitted(value, _SPEC, "it", is_open=version > NEWEST)
    _check_names(found)
    if version <= NEWEST:
        _check(found, version)
    return msgspec.convert({"containerEdits": {}} | found, Spec)


def _version_of(value: Any) -> tuple[int, ...]:
    if not isinstance(value, dict):
        raise CdiError("it has no fields, such as cdiVersion and kind")
    text = next((_text(each, "cdiVersion") for key, each in value.items() if key.lower() == "cdiversion"), "")
    matched = _VERSION.fullmatch(text)
    version = tuple(map(int, matched.groups())) if matched else ()
    if version <= NEWEST and ".".join(map(str, version)) not in VERSIONS:
        found = f"cdiVersion {text[:80]!r} is no version of the specification" if text else "it has no cdiVersion"
        raise CdiError(f"{found}; one is 0.5.0")
    return version


def _fitted(value: Any, shape: Any, where: str, is_open: bool) -> Any:
    """Return a value in that shape, with the names of fields as the specification writes them. Raises CdiError.

    With `is_open`, fields that the shape does not have are left out.
    """
    if isinstance(shape, _List):
        if not isinstance(value, list | None):
            raise CdiError(f"{where} must be a list")
        return [_fitted(each, shape.of, f"{where}[{at}]", is_open) for at, each in enumerate(value or ())]
    if shape is str:
        return _text(value, where)
    if isinstance(shape, dict | _Texts):
        if not isinstance(value, dict | None):
            raise CdiError(f"{where} must be a mapping")
        if isinstance(shape, _Texts):
            return {key: _text(each, f"{where}.{key}") for key, each in (value or {}).items()}
        fields: Mapping[str, Any] = shape
        return dict(_fields(value or {}, fields, where, is_open))
    if shape is bool:
        if not isinstance(value, bool | None):
            raise CdiError(f"{where} must be true or false")
        return bool(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not shape.low <= value <= shape.high:
        raise CdiError(f"{where} must be a whole number from {shape.low} to {shape.high}")
    return value


def _fields(value: dict[str, Any], shape: Mapping[str, Any], where: str, is_open: bool) -> Iterator[tuple[str, Any]]:
    names = {name.lower(): name for name in shape}
    for key in sorted(value):  # of two keys that differ in case, the engines take the last one in this order
        name = names.get(key.lower())
        if name is None:
            if not is_open:
                raise CdiError(f"{where} has the unknown field {key[:80]!r}")
        elif value[key] is not None:
            yield name, _fitted(value[key], shape[name], name if where == "it" else f"{where}.{name}", is_open)


def _text(value: Any, where: str) -> str:
    if isinstance(value, list | dict):
        raise CdiError(f"{where} must be a text")
    return "" if value is None else text_of(value)


# ------------------------------------------------------------------------------------------------- what is refused


def _check_names(spec: Mapping[str, Any]) -> None:
    """Raise CdiError for a spec whose devices no engine would find by their names."""
    kind = spec.get("kind", "")
    vendor, _, of_class = kind.partition("/")
    for word, pattern, what in ((vendor, _VENDOR, "vendor"), (of_class, _CLASS, "class")):
        if len(word) > NAME_CHARS_MAX or not pattern.fullmatch(word):
            raise CdiError(f"kind {kind[:80]!r} has no good {what}: two characters or more, a letter first")
    if not spec.get("devices"):
        raise CdiError("it has no devices")
    names: set[str] = set()
    for device in spec["devices"]:
        name = device.setdefault("name", "")
        device.setdefault("containerEdits", {})
        if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
            raise CdiError(f"no device can be called {name[:80]!r}")
        if name in names:
            raise CdiError(f"the device {name} is there twice")
        names.add(name)


def _check(spec: Mapping[str, Any], version: tuple[int, ...]) -> None:
    """Raise CdiError for contents that the specification, in that version, does not have."""
    _check_edits(spec.get("containerEdits", {}), "containerEdits", version)
    if "annotations" in spec:
        _require("annotations", (0, 6, 0), version)
    if "." in spec["kind"].partition("/")[2]:
        _require("a class with a dot", (0, 6, 0), version)
    for device in spec["devices"]:
        name, edits = device["name"], device["containerEdits"]
        if name[0].isdigit():
            _require("a device name that begins with a digit", (0, 5, 0), version)
        if "annotations" in device:
            _require("annotations", (0, 6, 0), version)
        if not any(each or key == "intelRdt" for key, each in edits.items()):
            raise CdiError(f"the device {name} has no containerEdits")
        _check_edits(edits, f"device {name}", version)


def _check_edits(edits: Mapping[str, Any], where: str, version: tuple[int, ...]) -> None:
    for field, since in (("intelRdt", (0, 7, 0)), ("additionalGids", (0, 7, 0)), ("netDevices", (1, 1, 0))):
        if field in edits:
            _require(field, since, version)
    _check_variables(edits.get("env", ()), where)
    for node in edits.get("deviceNodes", ()):
        if not node.get("path"):
            raise CdiError(f"{where} has a device node without a path")
        if node.get("type", "") not in _NODE_TYPES or not set(node.get("permissions", "")) <= set("rwm"):
            raise CdiError(f"{where}: the type or permissions of {node['path'][:80]} are none")
        if node.get("hostPath"):
            _require("the hostPath of a device node", (0, 5, 0), version)
    for hook in edits.get("hooks", ()):
        if hook.get("hookName") not in _STAGES or not hook.get("path"):
            raise CdiError(f"{where} has a hook without a path, or with an unknown hookName")
        _check_variables(hook.get("env", ()), where)
    for mount in edits.get("mounts", ()):
        if not mount.get("hostPath") or not mount.get("containerPath"):
            raise CdiError(f"{where} has a mount without a hostPath or containerPath")
        if mount.get("type"):
            _require("the type of a mount", (0, 4, 0), version)


def _check_variables(variables: list[str], where: str) -> None:
    if bad := next((each for each in variables if each.find("=") < 1), None):
        raise CdiError(f"{where}: {bad[:80]!r} is no variable with a value")


def _require(what: str, since: tuple[int, ...], version: tuple[int, ...]) -> None:
    if version < since:
        raise CdiError(f"cdiVersion {'.'.join(map(str, version))} has no {what}; {'.'.join(map(str, since))} has")
