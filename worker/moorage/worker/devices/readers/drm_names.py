"""Find the name of a PCI device in the host's own list of names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: where distributions keep pci.ids(5)
PCI_IDS_PATHS: Final = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids")
NAME_CHARS_MAX: Final = 96
_BYTES_MAX: Final = 8 * 1024 * 1024


def pci_names(wanted: Iterable[tuple[int, int]], root: Path) -> dict[tuple[int, int], str]:
    """Return names of (vendor, device) numbers, as far as the first list under `root` has them; one pass over it."""
    pairs = set(wanted)
    vendors = {f"{vendor:04x}" for vendor, _ in pairs}
    devices = {f"{vendor:04x}{device:04x}": (vendor, device) for vendor, device in pairs}
    found: dict[tuple[int, int], str] = {}
    if not pairs:
        return found
    for path in PCI_IDS_PATHS:
        try:
            with open(root / path, "rb") as file:
                lines = file.read(_BYTES_MAX).decode(errors="replace").splitlines()
        except OSError:
            continue
        vendor = ""
        for line in lines:
            if line[:1] not in ("\t", "#", ""):
                vendor = line[:4] if line[:4] in vendors else ""
            elif vendor and line[:1] == "\t" and line[1:2] != "\t":
                pair = devices.get(vendor + line[1:5])
                if pair is not None:
                    found[pair] = line[5:].strip()
        break
    return found


def clean_name(text: str) -> str:
    """Return text as one line of printable characters, cut to `NAME_CHARS_MAX`."""
    return "".join(each if each.isprintable() else " " for each in text).strip()[:NAME_CHARS_MAX]
