"""Which tests run in one process, since they share what is made for them, and which of these groups begin first.

xdist has marks for this, which it writes into a test's id; pytest 9.2 keeps ids where xdist 3.8 does not look, and all
tests were spread. So the groups are made of the ids here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT: Final = Path(__file__).resolve().parents[1]
#: what begins last is what a run waits for at its end: these take longest, by how the names of the groups begin
LONGEST: Final = (
    "tests/release/chaos/", "tests/system/deploy/test_dist.py", "tests/release/drivers/",
    "tests/system/worker/drivers/", "containers of", "node ", "tests/system/docs/",
    "tests/system/live/test_backup.py", "tests/system/cli/test_up.py", "tests/system/services/",
    "tests/release/fuzz/", "tests/release/sim/", "tests/system/tidy/",
)  # fmt: skip
#: tests here need nothing of each other, but for those of a file that share what takes long to make
SPREAD: Final = ("tests/system/live/", "tests/system/deploy/", "tests/system/services/")
SHARING: Final = (
    "tests/system/live/test_bad_input_table.py", "tests/system/deploy/test_dist.py",
    "tests/system/deploy/test_deb.py", "tests/system/deploy/test_image.py", "tests/system/deploy/test_kubernetes.py",
    "tests/system/deploy/test_systemd.py",
)  # fmt: skip
#: tests on one node run one after the other: folders with so many of them that they have several nodes
NODES: Final = {"tests/system/cli": 4}


@cache
def _node_of(file: str) -> str:
    """Return the name of the node that a file's tests share with others, or ""."""
    folder, _, name = file.rpartition("/")
    on_nodes = [each.name for each in _files_on_nodes(folder)]
    if name not in on_nodes:
        return ""
    return f"node {on_nodes.index(name) % NODES.get(folder, 1)} of {folder}"


@cache
def _files_on_nodes(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).glob("test_*.py")) if "node: Node" in path.read_text()]


def group_of(nodeid: str) -> str:
    """Return the name of a test's group: of its class or file, or of those that share a node, an image or a parse."""
    file, _, name = nodeid.partition("::")
    folder = file.rpartition("/")[0]
    if "[container" in name:
        return f"containers of {folder}"
    if folder == "tests/system/tidy":
        return "tests/system/tidy/"
    if node := _node_of(file):
        return node
    if file.startswith(SPREAD) and file not in SHARING:
        return nodeid
    kind, _, method = name.partition("[")[0].partition("::")
    return f"{file}::{kind}" if method else file


def put_longest_first(items: list[pytest.Item]) -> None:
    """Order the tests by group: first the groups that take longest, then those with the most tests."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)

    def begins(group: str) -> tuple[int, int]:
        rank = next((at for at, name in enumerate(LONGEST) if group.startswith(name)), len(LONGEST))
        return rank, -len(groups[group])

    items[:] = [item for group in sorted(groups, key=begins) for item in groups[group]]


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Give each process one group after the other, in their order (`--no-loadscope-reorder`)."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
