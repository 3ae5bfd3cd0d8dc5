"""The addresses of the first ranks of a gang's groups, in the text that a job has for that of rank 0: `0=a:1 4=b:2`."""

from __future__ import annotations

from collections.abc import Sequence

from moorage.scheduler.core.fleet.shape import Part


def with_address(known: str, parts: Sequence[Part], rank: int, address: str) -> str:
    """Return the addresses that are known with that of a rank; "" if the rank is not the first of its group."""
    if not any(part.first == rank for part in parts):
        return ""
    found = addresses_in(known) | {rank: address}
    return " ".join(f"{first}={found[first]}" for first in sorted(found))


def addresses_in(text: str) -> dict[int, str]:
    """Return the address of the first rank of each group, as far as it is known, by that rank."""
    pairs = (word.partition("=") for word in text.split())
    return {int(first): address for first, _, address in pairs if first.isdecimal()}
