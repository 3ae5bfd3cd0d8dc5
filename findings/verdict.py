"""How a finding ends: what was seen, and whether it is as its head describes."""

from __future__ import annotations

from collections.abc import Mapping


def verdict(as_described: bool, saw: Mapping[str, object]) -> None:
    """Print what was seen, and end this process with 0 if it is as described, else with 1."""
    for name, value in saw.items():
        print(f"  {name}: {value}")
    print("as described" if as_described else "changed")
    raise SystemExit(0 if as_described else 1)
