"""What lies in the folders of `data_dirs`, for the scheduler: jobs that read a path of them go where it is."""

from __future__ import annotations

import os
import threading
import time
from heapq import nsmallest
from typing import Final

from moorage.schemas.held_data import HELD_MAX, keys_below

#: folders are read again so many seconds later
AGE_S: Final = 15.0
#: how many names are told of all folders; the first ones by name
NAMES_MAX: Final = HELD_MAX // 2


class Listing:
    """The names in the folders, read in a thread of its own: a file server that hangs holds up nothing else."""

    def __init__(self, driver: str, folders: tuple[str, ...]) -> None:
        self._driver = driver
        self._folders = folders
        self._keys: list[str] = []
        self._read_s = -AGE_S
        self._reading: threading.Thread | None = None

    def keys(self) -> list[str]:
        """Return what a load frame says of the folders as they were last read; what is older is read meanwhile."""
        is_idle = self._reading is None or not self._reading.is_alive()
        if self._folders and is_idle and time.monotonic() - self._read_s >= AGE_S:
            self._read_s = time.monotonic()
            self._reading = threading.Thread(target=self._read, name="data_dirs", daemon=True)
            self._reading.start()
        return self._keys

    def _read(self) -> None:
        found: list[str] = []
        for folder in self._folders:
            try:
                with os.scandir(folder) as entries:
                    names = nsmallest(NAMES_MAX, (entry.name for entry in entries))
            except OSError:
                continue
            found += keys_below(self._driver, folder, names)
        self._keys = found[:NAMES_MAX]
