"""Device nodes refused by the kernel, to real processes: made nodes with the numbers of NVIDIA's driver.

No such driver is here, so a node that the kernel lets a process open is without a device (ENXIO), and a refused one
gives EPERM.
"""

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.system.cgroup import CgroupBase, CgroupFolder
from moorage.system.device_fence import (
    MINOR_MAX,
    RANGES_MAX,
    ControllerFences,
    NodeRange,
    ProgramFences,
    fences_here,
    is_refused,
    program,
)

NAME = f"moorage-fence-test-{os.getpid()}"
NODES = {"nvidia0": (195, 0), "nvidia1": (195, 1), "nvidiactl": (195, 255), "uvm": (511, 0), "null": (1, 3)}
#: tries to open each node of a folder in the group, which it enters itself, and prints name and error number
OPENS = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
for name in sorted(os.listdir(sys.argv[2])):
    try:
        os.close(os.open(sys.argv[2] + "/" + name, os.O_RDWR))
        print(name, 0)
    except OSError as error:
        print(name, error.errno)
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    folder = tmp_path / "dev"
    folder.mkdir()
    for name, number in NODES.items():
        try:
            os.mknod(folder / name, 0o020666, os.makedev(*number))
        except PermissionError:
            pytest.skip("device nodes can be made by root only")
    try:
        os.close(os.open(folder / "null", os.O_RDWR))
    except PermissionError:
        pytest.skip(f"{tmp_path} is mounted nodev")
    return folder


@pytest.fixture
def base() -> Iterator[CgroupBase]:
    made = CgroupBase.open(NAME)
    if made is None:
        pytest.skip("no writable cgroup v2 here")
    yield made
    made.kill()
    while not made.remove():
        made.kill()


Group = tuple[ProgramFences | ControllerFences, CgroupFolder | None]


@pytest.fixture(params=["cgroup2", "cgroup1"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """The fences of one version of cgroups, and the group of version 2 to close."""
    base = request.getfixturevalue("base") if request.param == "cgroup2" else None
    fences, why = fences_here(NAME, base)
    if fences is None:
        pytest.skip(f"{request.param} refuses no devices here: {why}")
    assert fences.kind == request.param
    yield fences, None if base is None else base.create("member", None, None)[0]
    if isinstance(fences, ControllerFences):
        fences.remove()


def opened(group: CgroupFolder, nodes: Path) -> dict[str, int]:
    run = subprocess.run([sys.executable, "-c", OPENS, group.path, nodes], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in map(str.split, run.stdout.splitlines())}


def close(group: Group, *refused: NodeRange) -> CgroupFolder:
    fences, folder = group
    made = fences.close(folder, "member", refused)
    closed = made or folder
    assert closed is not None
    return closed


def test_only_the_nodes_in_the_ranges_are_refused(group: Group, nodes: Path) -> None:
    closed = close(group, NodeRange(195, 1, 253), NodeRange(511))
    assert opened(closed, nodes) == {
        "nvidia0": errno.ENXIO, "nvidia1": errno.EPERM, "nvidiactl": errno.ENXIO, "uvm": errno.EPERM, "null": 0,
    }  # fmt: skip
    assert closed.remove()


async def test_it_is_seen_that_a_process_may_not_open_a_node(group: Group, nodes: Path) -> None:
    closed = close(group, NodeRange(195, 1, 1))
    inside = await asyncio.create_subprocess_exec("/bin/sleep", "600")
    try:
        Path(closed.path, "cgroup.procs").write_text(str(inside.pid))
        names = ("nvidia0", "nvidia1", "null", "gone")
        seen = {name: await is_refused(inside.pid, str(nodes / name)) for name in names}
        assert seen == {"nvidia0": False, "nvidia1": True, "null": False, "gone": False}
        assert not await is_refused(os.getpid(), str(nodes / "nvidia1")), "another group opens it"
    finally:
        inside.kill()
        await inside.wait()
    assert not await is_refused(inside.pid, str(nodes / "nvidia1")), "nothing is said of a process that is gone"
    assert closed.remove()


def test_a_block_device_of_a_refused_number_stays_open(group: Group, nodes: Path) -> None:
    os.mknod(nodes / "block", 0o060666, os.makedev(195, 1))
    closed = close(group, NodeRange(195))
    found = opened(closed, nodes)
    assert found["block"] == errno.ENXIO
    assert {found["nvidia0"], found["nvidia1"], found["nvidiactl"]} == {errno.EPERM}
    assert closed.remove()


def test_groups_below_are_closed_too(group: Group, nodes: Path) -> None:
    closed = close(group, NodeRange(195, 1, 1))
    below = CgroupFolder(closed.path + "/below")
    os.mkdir(below.path)
    assert opened(below, nodes)["nvidia1"] == errno.EPERM
    assert closed.remove()


def test_a_refused_node_cannot_be_made_anew(group: Group, nodes: Path) -> None:
    closed = close(group, NodeRange(195, 1, 1))
    code = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
os.mknod(sys.argv[2], 0o020666, os.makedev(195, 1))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, closed.path, nodes / "own"], capture_output=True, text=True, check=False
    )
    assert "Operation not permitted" in run.stderr
    assert closed.remove()


def test_a_descriptor_of_another_process_goes_round_it(group: Group, nodes: Path) -> None:
    """The kernel asks at open alone: `docs/explanation/security.md` says so."""
    closed = close(group, NodeRange(1, 3, 3))  # null, so that there is something to open
    assert opened(closed, nodes)["null"] == errno.EPERM
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    code = """
import os, socket, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
_, passed, _, _ = socket.recv_fds(socket.socket(fileno=int(sys.argv[2])), 1, 1)
print(os.write(passed[0], b"used"))
"""
    with ours, theirs, open(nodes / "null", "wb") as null:
        socket.send_fds(ours, [b"x"], [null.fileno()])
        run = subprocess.run(
            [sys.executable, "-c", code, closed.path, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            check=True,
        )
    assert run.stdout == "4\n"
    assert closed.remove()


def test_many_ranges_still_load(group: Group, nodes: Path) -> None:
    ranges = [NodeRange(300, minor, minor) for minor in range(0, 2 * (RANGES_MAX - 1), 2)]
    closed = close(group, *ranges, NodeRange(195, 1, 1))
    assert opened(closed, nodes)["nvidia1"] == errno.EPERM
    assert closed.remove()


@pytest.mark.parametrize(
    "refused",
    [[NodeRange(195)] * (RANGES_MAX + 1), [NodeRange(195, 3, 2)], [NodeRange(-1)], [NodeRange(1, 0, MINOR_MAX + 1)]],
)
def test_what_is_out_of_bounds_makes_no_program(refused: list[NodeRange]) -> None:
    with pytest.raises(OSError, match=r"ranges of devices|range of devices"):
        program(refused)


def test_a_group_that_cannot_be_closed_is_not_left(group: Group) -> None:
    with pytest.raises(OSError, match="range of devices"):
        close(group, NodeRange(195, 3, 2))
    fences, _ = group
    if isinstance(fences, ControllerFences):
        assert [each for each in os.scandir(fences.path) if each.is_dir()] == []


def test_without_a_group_of_version_2_a_program_is_attached_to_nothing() -> None:
    with pytest.raises(OSError, match="no cgroup"):
        ProgramFences().close(None, "member", ())
