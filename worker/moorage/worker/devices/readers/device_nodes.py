"""List the files in /dev that a container needs for a device, on a host without CDI specs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: files that every device of a vendor needs, beside its own
SHARED: Final = {
    "nvidia": ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
    "amd": ("/dev/kfd",),
    "intel": (),
}
_RENDER: Final = re.compile(r"/dev/dri/renderD[0-9]+")


def device_nodes(vendor: str, own: Iterable[str], root: Path = Path("/")) -> tuple[list[str], list[str]]:
    """Return the files that a container of this device gets, and warnings.

    `own` are the device's own files, from `Inventory.nodes`. For an unknown vendor only the render node is given. A
    missing file is left out with a warning, because older drivers lack some.
    """
    wanted, warnings = [*SHARED.get(vendor, ()), *own], list[str]()
    if vendor not in SHARED:
        wanted = [node for node in wanted if _RENDER.fullmatch(node)]
        warnings.append(
            f"the files that a GPU of vendor {vendor!r} needs are unknown: a container gets only its render node"
        )
    if not any(node in wanted for node in own):
        warnings.append(f"this host does not report which file in /dev is the GPU's own (vendor {vendor})")
    there = [node for node in wanted if (root / node.lstrip("/")).exists()]
    warnings += [f"{node} does not exist" for node in wanted if node not in there]
    return there, warnings
