"""Read this machine's devices: in slot order, with their load and health, and whether their memory is free.

A reader is a class derived from `base.Inventory` that has `open`, and one line here. A reader of another package has
its line in that package's own `pyproject.toml`: see `GROUP`.
"""

from __future__ import annotations

from typing import Final

#: the entry points by which a package offers a reader
GROUP: Final = "moorage.readers"
#: the readers that come with moorage, by name; their devices become slots in this order
READERS: Final = {
    "nvidia": "moorage.worker.devices.readers.nvml:NvmlInventory",
    "drm": "moorage.worker.devices.readers.drm:DrmInventory",
}
