"""Read the devices in CDI specs: files of a host that say what a container needs for a device.

Source: what podman 4.3, docker 26.1 and podman 5.4 do with the files of `tests/cdi_specs.py`. A device that is in two
files of one folder does not exist, and a later folder overrides an earlier one.

Of a device only its names and files in /dev are read (`cdi_spec.py`); the engine judges the rest.

A file that cannot be used is a line in `Registry.faults`, not an error: the other files must stay usable.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moorage.schemas.printable import in_one_line
from moorage.worker.devices.readers.cdi_spec import CdiError, DeviceNode, Spec, SpecDevice, parse

#: folders of specs, the one with precedence last; the variable names more folders, separated as in PATH
FOLDERS: Final = ("etc/cdi", "var/run/cdi")
FOLDERS_VARIABLE: Final = "CDI_SPEC_DIRS"
SUFFIXES: Final = (".json", ".yaml")
FILE_BYTES_MAX: Final = 1024 * 1024
FILES_MAX: Final = 256
DEVICES_MAX: Final = 4096
FOLDERS_MAX: Final = 32
FAULT_CHARS_MAX: Final = 300
ALL: Final = "all"
#: the kind of each vendor's devices
KINDS: Final = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "intel.com/gpu"}


@dataclass(frozen=True, slots=True)
class Registry:
    """The devices of all specs by qualified name, `nvidia.com/gpu=0`, each with its spec."""

    devices: Mapping[str, tuple[Spec, SpecDevice]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def names(self, kind: str) -> list[str]:
        """Return the names of the devices of a kind, such as `0`, without the kind."""
        return [name.removeprefix(f"{kind}=") for name in self.devices if name.startswith(f"{kind}=")]

    def resolve(self, names: Iterable[str]) -> list[DeviceNode]:
        """Return the device nodes of a container with these devices: those of each spec once, and of each device.

        Raises CdiError with the names that are in no spec.
        """
        wanted = list(dict.fromkeys(names))
        if missing := [name for name in wanted if name not in self.devices]:
            raise CdiError(f"unresolvable CDI devices {', '.join(missing)}")
        specs = {id(spec): spec.container_edits for spec, _ in map(self.devices.__getitem__, wanted)}
        edits = [*specs.values(), *(self.devices[name][1].container_edits for name in wanted)]
        return [node for each in edits if each for node in each.nodes]

    def own_nodes(self, name: str) -> frozenset[str]:
        """Return the host paths of a device's own device nodes, without those of its whole spec."""
        _, device = self.devices[name]
        return frozenset(node.host_path or node.path for node in device.container_edits.nodes)


# --------------------------------------------------------------------------------------------------------- reading


def folders(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> list[Path]:
    """Return the folders of specs, the one with precedence last: those of the variable come after the standard ones."""
    more = (os.environ if env is None else env).get(FOLDERS_VARIABLE, "").split(os.pathsep)
    return [root / folder for folder in FOLDERS] + [Path(each) for each in more if each][:FOLDERS_MAX]


def read_registry(where: Iterable[Path]) -> Registry:
    """Return the devices in the specs of these folders, at most `DEVICES_MAX`.

    A later folder's device replaces an earlier folder's. A device that one folder has twice is left out, even if a
    later folder has it once.
    """
    devices: dict[str, tuple[Spec, SpecDevice]] = {}
    faults: list[str] = []
    twice: dict[str, Path] = {}
    left_out = 0
    for folder in where:
        own: set[str] = set()
        for path in _files(folder, faults):
            try:
                spec = read_spec(path)
            except (CdiError, OSError) as error:
                faults.append(_fault(path, error))
                continue
            for device in spec.devices:
                name = f"{spec.kind}={device.name}"
                if name in own:
                    twice.setdefault(name, folder)
                elif name in devices or len(devices) < DEVICES_MAX:
                    devices[name] = (spec, device)
                else:
                    left_out += 1
                own.add(name)
    for name, folder in twice.items():
        faults.append(f"{folder}: two files have the device {name}, so it is in none")
        devices.pop(name, None)
    if left_out:
        faults.append(f"only the first {DEVICES_MAX} devices are used; {left_out} more are left out")
    return Registry(devices, tuple(faults))


def spec_files(folder: Path) -> list[Path]:
    """Return the files of specs in a folder, at most `FILES_MAX`, by name; none for a folder that cannot be read."""
    return _files(folder, [])


def _files(folder: Path, faults: list[str]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(
                folder / each.name
                for each in entries
                if each.name.endswith(SUFFIXES) and not each.is_dir(follow_symlinks=False)
            )
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
    return parse(_text_of(path))


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


def _fault(path: Path, error: Exception) -> str:
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return in_one_line(f"{path}: {why}")[:FAULT_CHARS_MAX]
