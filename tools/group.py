"""Print the requirements of dependency groups, for `pip install -r`: `python tools/group.py test dev`.

`pip install --group` does the same from pip 25.1 on; the pip that a new environment of Python 3.11 or 3.12 has is
older. It needs Python alone: it runs before anything is installed.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def group(name: str) -> list[str]:
    """Return the requirements of a group. Raises KeyError if there is none of that name."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        requirements: list[str] = tomllib.load(file)["dependency-groups"][name]
    return requirements


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n".join(group(name)))
