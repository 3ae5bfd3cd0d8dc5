"""Read, resolve and write CDI specs: files of a host that say what a container needs for a device.

Source: the Container Device Interface specification up to 1.1.0. Where the document leaves a case open, or engines
differ from it, this module does what Docker 26.1 and Podman 4.3 do: a device that is in two files of one folder does
not exist, a later folder overrides an earlier one, and a file with an error is ignored as a whole. A vendor or class of
one letter crashes dockerd 26.1 when it reads the file, so this module neither reads nor writes one.

A file that cannot be used is a line in `Registry.faults`, not an error: the other files must stay usable.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from moorage.schemas.printable import in_one_line

#: folders of specs, the one with precedence last; the variable names more folders, separated as in PATH
FOLDERS: Final = ("etc/cdi", "var/run/cdi")
FOLDERS_VARIABLE: Final = "CDI_SPEC_DIRS"
SUFFIXES: Final = (".json", ".yaml", ".yml")
FILE_BYTES_MAX: Final = 1024 * 1024
FILES_MAX: Final = 256
DEVICES_MAX: Final = 4096
FOLDERS_MAX: Final = 32
FAULT_CHARS_MAX: Final = 300
NAME_CHARS_MAX: Final = 256
ALL: Final = "all"
#: the kind of each vendor's devices
KINDS: Final = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "intel.com/gpu"}

#: the known versions; `lowest_version` says which version introduced what
VERSIONS: Final = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
_VENDOR: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]")
_CLASS: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]")
_NAME: Final = re.compile(r"[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9_.:-]*[A-Za-z0-9]")


class DeviceNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    path: str
    host_path: str = ""
    type: str = ""
    major: int | None = None
    minor: int | None = None
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


class NetDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    host_interface_name: str
    name: str


class Mount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    host_path: str
    container_path: str
    options: list[str] = []
    type: str = ""


class Hook(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    hook_name: Literal[
        "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"
    ]  # fmt: skip
    path: str
    args: list[str] = []
    env: list[str] = []
    timeout: int | None = None


class IntelRdt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    clos_id: str = msgspec.field(default="", name="closID")
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    enable_cmt: bool = msgspec.field(default=False, name="enableCMT")
    enable_mbm: bool = msgspec.field(default=False, name="enableMBM")


class Edits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """What a container gets: variables, device nodes, mounts, hooks and groups."""

    env: list[str] = []
    device_nodes: list[DeviceNode] = []
    net_devices: list[NetDevice] = []
    mounts: list[Mount] = []
    hooks: list[Hook] = []
    additional_gids: list[int] = msgspec.field(default_factory=list, name="additionalGids")
    intel_rdt: IntelRdt | None = None

    def __add__(self, other: Edits) -> Edits:
        """Return both edits, `other` last; of two `intelRdt` the later one."""
        lists = (name for name in self.__struct_fields__ if name != "intel_rdt")
        joined: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in lists}
        return Edits(**joined, intel_rdt=other.intel_rdt or self.intel_rdt)


class SpecDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    name: str
    container_edits: Edits
    annotations: dict[str, str] = {}


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """One file. If any of its devices is used, `container_edits` are applied once, before the devices' edits."""

    cdi_version: str
    kind: str
    devices: list[SpecDevice]
    annotations: dict[str, str] = {}
    container_edits: Edits = Edits()


class CdiError(ValueError):
    """A spec that cannot be used, or names that are in no spec."""


@dataclass(frozen=True, slots=True)
class Registry:
    """The devices of all specs by qualified name, `nvidia.com/gpu=0`, each with its spec."""

    devices: Mapping[str, tuple[Spec, SpecDevice]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def names(self, kind: str) -> list[str]:
        """Return the names of the devices of a kind, such as `0`, without the kind."""
        return [name.removeprefix(f"{kind}=") for name in self.devices if name.startswith(f"{kind}=")]

    def resolve(self, names: Iterable[str]) -> Edits:
        """Return what a container with these devices gets: the edits of each spec once, and those of the devices.

        Raises CdiError with the names that are in no spec.
        """
        wanted = list(dict.fromkeys(names))
        if missing := [name for name in wanted if name not in self.devices]:
            raise CdiError(f"unresolvable CDI devices {', '.join(missing)}")
        edits, seen = Edits(), set[int]()
        for name in wanted:
            spec, device = self.devices[name]
            if id(spec) not in seen:
                seen.add(id(spec))
                edits += spec.container_edits
            edits += device.container_edits
        return edits

    def own_nodes(self, name: str) -> frozenset[str]:
        """Return the host paths of a device's own device nodes, without those of its whole spec."""
        _, device = self.devices[name]
        return frozenset(node.host_path or node.path for node in device.container_edits.device_nodes)


# --------------------------------------------------------------------------------------------------------- reading


def folders(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> list[Path]:
    """Return the folders of specs, the one with precedence last: those of the variable come after the standard ones."""
    more = (os.environ if env is None else env).get(FOLDERS_VARIABLE, "").split(os.pathsep)
    return [root / folder for folder in FOLDERS] + [Path(each) for each in more if each][:FOLDERS_MAX]


def read_registry(where: Iterable[Path]) -> Registry:
    """Return the devices in the specs of these folders, at most `DEVICES_MAX`.

    A later folder's device replaces an earlier folder's. A device that one folder has twice is left out.
    """
    devices: dict[str, tuple[Spec, SpecDevice]] = {}
    faults: list[str] = []
    left_out = 0
    for folder in where:
        own: dict[str, tuple[Spec, SpecDevice]] = {}
        twice: dict[str, None] = {}
        for path in _files(folder, faults):
            try:
                spec = read_spec(path)
            except (CdiError, OSError) as error:
                faults.append(_fault(path, error))
                continue
            for device in spec.devices:
                name = f"{spec.kind}={device.name}"
                if name in own:
                    twice[name] = None
                own[name] = (spec, device)
        for name in twice:
            faults.append(f"{folder}: two files have the device {name}, so it is in neither")
        for name, found in own.items():
            if name in twice:
                devices.pop(name, None)
            elif name in devices or len(devices) < DEVICES_MAX:
                devices[name] = found
            else:
                left_out += 1
    if left_out:
        faults.append(f"only the first {DEVICES_MAX} devices are used; {left_out} more are left out")
    return Registry(devices, tuple(faults))


def spec_files(folder: Path) -> list[Path]:
    """Return the files of specs in a folder, at most `FILES_MAX`, by name; none for a folder that cannot be read."""
    return _files(folder, [])


def _files(folder: Path, faults: list[str]) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    except FileNotFoundError:
        return []
    except OSError as error:
        faults.append(_fault(folder, error))
        return []
    if len(found) > FILES_MAX:
        faults.append(f"{folder}: only the first {FILES_MAX} of {len(found)} files are read")
    return found[:FILES_MAX]


def read_spec(path: Path) -> Spec:
    """Return a spec. Raises CdiError for one that cannot be used, OSError for one that cannot be read."""
    text = _text_of(path)
    try:
        return parse(text) if path.suffix == ".json" else parse(_json_of(text))
    except RecursionError:
        raise CdiError("it is nested too deep") from None


def _text_of(path: Path) -> bytes:
    """Return the bytes of a regular file, consistent in time. Raises CdiError, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe must not block
    with open(descriptor, "rb") as file:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise CdiError("it is not a plain file")
        text = file.read(FILE_BYTES_MAX + 1)
        after = os.fstat(descriptor)
    if len(text) > FILE_BYTES_MAX:
        raise CdiError(f"it has more than {FILE_BYTES_MAX} bytes")
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size) or len(text) != after.st_size:
        raise CdiError("it was changed while it was read; restart the agent to read it again")
    return text


def _json_of(text: bytes) -> bytes:
    """Return the content of a YAML text as JSON.

    Raises CdiError; aliases are refused, because a few lines could expand to billions.
    """
    import yaml  # imported late, because most workers need no YAML

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Plain(loader):  # type: ignore[misc, valid-type]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            if len(keys) != len(set(map(str, keys))):
                raise CdiError("it has the same key twice")
            return super().construct_mapping(node, deep=deep)

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, loader)):
            raise CdiError("it has a YAML alias, and a spec needs none")
        return msgspec.json.encode(yaml.load(text, Plain))
    except CdiError:
        raise
    except yaml.YAMLError as error:
        raise CdiError(f"no YAML: {error}") from None
    except (ValueError, TypeError) as error:  # an invalid date, a key that is a list, true or null
        raise CdiError(str(error)) from None


def parse(text: bytes) -> Spec:
    """Return the spec of a JSON text. Raises CdiError."""
    try:
        spec = msgspec.json.decode(text, type=Spec)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CdiError(str(error)) from None
    check(spec)
    return spec


def check(spec: Spec) -> None:
    """Raise CdiError for a spec that an engine would ignore, or that would crash it."""
    if spec.cdi_version not in VERSIONS:
        raise CdiError(f"cdiVersion {spec.cdi_version!r} must be one of {', '.join(VERSIONS)}")
    vendor, _, kind = spec.kind.partition("/")
    for word, pattern, what in ((vendor, _VENDOR, "vendor"), (kind, _CLASS, "class")):
        if len(word) > NAME_CHARS_MAX or not pattern.fullmatch(word):
            raise CdiError(f"kind {spec.kind[:80]!r} has no good {what}: two characters or more, a letter first")
    if not spec.devices:
        raise CdiError("it has no devices")
    names: set[str] = set()
    for device in spec.devices:
        if len(device.name) > NAME_CHARS_MAX or not _NAME.fullmatch(device.name):
            raise CdiError(f"no device can be called {device.name[:80]!r}")
        if device.name in names:
            raise CdiError(f"the device {device.name} is there twice")
        names.add(device.name)
        if device.container_edits == Edits():
            raise CdiError(f"the device {device.name} has empty containerEdits")
        _check_edits(device.container_edits)
    _check_edits(spec.container_edits)
    needed = lowest_version(spec)
    if VERSIONS.index(spec.cdi_version) < VERSIONS.index(needed):
        raise CdiError(f"cdiVersion {spec.cdi_version} is too low for what it contains: {needed}")


def _check_edits(edits: Edits) -> None:
    for variable in edits.env:
        if not variable.partition("=")[1] or variable.startswith("="):
            raise CdiError(f"env must be NAME=VALUE, found {variable!r}")
    for node in edits.device_nodes:
        if not node.path or node.type not in ("", "b", "c", "u", "p"):
            raise CdiError(f"no device node: {node.path!r} of type {node.type!r}")
        if not set(node.permissions) <= set("rwm"):
            raise CdiError(f"permissions of {node.path} must be of r, w and m, found {node.permissions!r}")
    for mount in edits.mounts:
        if not mount.host_path or not mount.container_path:
            raise CdiError("a mount needs hostPath and containerPath")
    for hook in edits.hooks:
        if not hook.path.startswith("/"):
            raise CdiError(f"a hook needs an absolute path, found {hook.path!r}")


def lowest_version(spec: Spec) -> str:
    """Return the lowest version of CDI that has everything in a spec."""
    edits = [spec.container_edits, *(device.container_edits for device in spec.devices)]
    uses = {
        "1.1.0": any(each.net_devices for each in edits),
        "0.7.0": any(each.intel_rdt or each.additional_gids for each in edits),
        "0.6.0": bool(spec.annotations or any(device.annotations for device in spec.devices))
        or "." in spec.kind.partition("/")[2],
        "0.5.0": any(node.host_path for each in edits for node in each.device_nodes)
        or any(device.name[:1].isdigit() for device in spec.devices),
        "0.4.0": any(mount.type for each in edits for mount in each.mounts),
    }
    return next((version for version, is_used in uses.items() if is_used), "0.3.0")


def _fault(path: Path, error: Exception) -> str:
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return in_one_line(f"{path}: {why}")[:FAULT_CHARS_MAX]


# --------------------------------------------------------------------------------------------------------- writing


def write_spec(folder: Path, kind: str, devices: Sequence[SpecDevice], edits: Edits = Edits()) -> Path:  # noqa: B008
    """Write a spec with the lowest version that allows its content, atomically; return its path.

    Raises CdiError for a spec that an engine would not read, OSError for a folder that cannot be written.
    """
    spec = Spec(VERSIONS[-1], kind, list(devices), container_edits=edits)
    spec = msgspec.structs.replace(spec, cdi_version=lowest_version(spec))
    text = msgspec.json.format(msgspec.json.encode(spec)) + b"\n"
    parse(text)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"moorage-{kind.replace('/', '-')}.json"
    unfinished = path.with_suffix(".unfinished")  # engines do not read this suffix
    unfinished.write_bytes(text)
    os.replace(unfinished, path)
    return path
