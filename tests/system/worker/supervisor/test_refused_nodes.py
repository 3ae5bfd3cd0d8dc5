"""Attempts to which the kernel refuses device nodes, through a supervisor, on cgroups of version 2 and of version 1.

No NVIDIA driver is here: a made node with its numbers is ENXIO to who may open it, and EPERM to who may not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moorage.worker.supervisor.protocol import EndAttempt, StartAttempt
from tests.system.worker.supervisor_rig import Rig, arguments_of, rig_at, sh

KINDS = {"cgroup": "cgroup2", "walk": "cgroup1", "forked": "cgroup1"}
OTHERS = ((195, 0, 2), (195, 4, 253))
#: opens each node and prints the error's number
OPENS = """
import os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR))
        print(os.path.basename(path), "open")
    except OSError as error:
        print(os.path.basename(path), os.strerror(error.errno))
"""


def nodes(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    for minor in (0, 3, 255):
        try:
            os.mknod(folder / f"nvidia{minor}", 0o020666, os.makedev(195, minor))
        except FileExistsError:
            continue
        except PermissionError:
            pytest.skip("device nodes can be made by root only")
    return [str(each) for each in sorted(folder.iterdir())]


def opens(key: str, folder: Path, refused: tuple[tuple[int, int, int], ...]) -> StartAttempt:
    attempt = sh(key, "", refused_nodes=refused)
    return StartAttempt(
        key=key, argv=(sys.executable, "-c", OPENS, *nodes(folder)), env=attempt.env, refused_nodes=refused
    )


def skip_without(rig: Rig, proof: str) -> None:
    if rig.client.device_fence != KINDS[proof]:
        pytest.skip(f"no fence by {KINDS[proof]} here: {rig.client.no_device_fence}")


@pytest.mark.parametrize("proof", ["cgroup", "walk", "forked"])
async def test_an_attempt_opens_its_own_node_and_no_other(tmp_path: Path, proof: str) -> None:
    async with rig_at(tmp_path / "s", *arguments_of(proof)) as rig:
        skip_without(rig, proof)
        ended = await rig.run(opens("k", tmp_path / "dev", OTHERS))
        assert ended.exit_code == 0
        assert rig.text("k").splitlines() == [
            "nvidia0 Operation not permitted", "nvidia255 No such device or address",
            "nvidia3 No such device or address",
        ]  # fmt: skip
        # another attempt of the same supervisor is not closed by it
        await rig.run(opens("free", tmp_path / "dev", ()))
        assert "not permitted" not in rig.text("free")


@pytest.mark.parametrize("proof", ["cgroup", "walk"])
async def test_what_an_attempt_forks_is_closed_too_and_nothing_is_left_of_it(tmp_path: Path, proof: str) -> None:
    async with rig_at(tmp_path / "s", *arguments_of(proof)) as rig:
        skip_without(rig, proof)
        [node, *_] = nodes(tmp_path / "dev")
        script = f"(setsid sh -c 'cat {node}; exec sleep 600' 2>&1) & sleep 600"
        await rig.client.start([sh("k", script, refused_nodes=OTHERS)])
        assert "Operation not permitted" in (await rig.line("k"))[0]
        await rig.client.end([EndAttempt(key="k", grace_s=0.0)])
        assert (await rig.ended("k")).proof == ("cgroup" if proof == "cgroup" else "walk")
        mark = (tmp_path / "s" / "mark").read_text()
        assert not list(Path("/sys/fs/cgroup").glob(f"**/moorage-{mark}/m-*")), "its group is removed with it"


async def test_a_fence_that_cannot_be_made_starts_nothing_and_says_why(tmp_path: Path) -> None:
    async with rig_at(tmp_path / "s") as rig:
        ended = await rig.run(opens("k", tmp_path / "dev", ((195, 3, 2),)))
        assert (ended.reason, ended.stage, ended.proof) == ("start-failed", "devices", "never-ran")
        assert ended.message
        assert rig.text("k") == ""
