"""NVIDIA's own libcuda, which looks functions up without a GPU."""

from __future__ import annotations

from tests.nvidia.packages import unpacked


def folder() -> tuple[str, str]:
    """Return the folder that has libcuda.so.1, or "" and why it cannot be had."""
    cache, why = unpacked("libcuda1")
    if why:
        return "", why
    found = next(cache.glob("usr/lib/*/nvidia/current/libcuda.so.1"), None)
    return (str(found.parent), "") if found else ("", "the package libcuda1 has no libcuda.so.1")
