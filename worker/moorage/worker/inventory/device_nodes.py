"""The files in /dev that a container must be given for a device, on a host without CDI specs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: what every device of a vendor needs, beside its own files
SHARED: Final = {
    "nvidia": ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"),
    "amd": ("/dev/kfd",),
    "intel": (),
}
_RENDER: Final = re.compile(r"/dev/dri/renderD[0-9]+")
#: number of the first render node
RENDER_FIRST: Final = 128


def own_node(vendor: str, number: int) -> str:
    """Return the file of the device with this number: NVML's minor number, or the place among the render nodes."""
    return f"/dev/nvidia{number}" if vendor == "nvidia" else f"/dev/dri/renderD{RENDER_FIRST + number}"


def device_nodes(vendor: str, own: Iterable[str], root: Path = Path("/")) -> tuple[list[str], list[str]]:
    """Return the files that a container of this device gets, and what to warn of.

    `own` are the device's own files, as `Inventory.nodes` has them. Of a vendor that is not known only the render node
    is given. A file that is not there is left out, with a warning: an older driver lacks some.
    """
    wanted, warnings = [*SHARED.get(vendor, ()), *own], list[str]()
    if vendor not in SHARED:
        wanted = [node for node in wanted if _RENDER.fullmatch(node)]
        warnings.append(
            f"what a GPU of the vendor {vendor!r} needs is not known: a container gets its render node alone"
        )
    if not any(node in wanted for node in own):
        warnings.append(f"this host does not tell which file in /dev is the GPU's own (vendor {vendor})")
    there = [node for node in wanted if (root / node.lstrip("/")).exists()]
    warnings += [f"{node} is not there" for node in wanted if node not in there]
    return there, warnings
