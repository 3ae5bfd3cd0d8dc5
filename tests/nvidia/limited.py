"""Processes under the limiter, on `quick.c` in the place of the driver: what they say, and what they really held."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import runpy
import shutil
import struct
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from moorage.worker.sharing.limiter.segment import Part, Segment
from tests.nvidia.stub import FOLDER_VARIABLE

_HERE: Final = Path(__file__).parent
_WORKER: Final = _HERE.parents[1] / "worker"
_LIMITER: Final = _WORKER / "moorage" / "worker" / "sharing" / "limiter"
_KEPT: Final = tempfile.TemporaryDirectory(prefix="moorage-limited-")
#: devices that quick.c has, and the memory of each
DEVICES: Final = 8
TOTAL: Final = 16 << 30


@functools.cache
def built() -> Path:
    """Return a folder with quick.c as libcuda.so.1, app.c and the limiter of these sources, or skip."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to build the limiter and what is tested with it")
    folder = Path(_KEPT.name)
    flags = [compiler, "-O1", "-std=gnu11", "-Wall", "-Werror"]
    driver, app = folder / "libcuda.so.1", folder / "app"
    linked = "-Wl,-Bsymbolic-functions,-soname,libcuda.so.1"  # as NVIDIA's, its functions call each other
    library = ["-shared", "-fPIC", linked, "-o", str(driver), str(_HERE / "quick.c")]
    program = ["-o", str(app), str(_HERE / "app.c"), str(driver), "-pthread", "-ldl"]
    for words in (library, program):
        done = subprocess.run([*flags, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    made, sources = _LIMITER / "limiter.bin", [_LIMITER / "limiter.c", _LIMITER / "limiter.h"]
    if made.exists() and all(made.stat().st_mtime >= each.stat().st_mtime for each in sources):
        shutil.copy2(made, folder)
    else:
        runpy.run_path(str(_WORKER / "build_launcher.py"))["build"](folder / "limiter.bin", "-Werror")
    return folder


def put_for_containers(folder: Path) -> None:
    """Put app.c's program, and the libraries that an image of the tests lacks, where every user of a container may read
    them."""
    folder.mkdir(mode=0o755)
    for path in (built() / "app", built() / "libcuda.so.1", Path(find_library("libdl.so.2"))):
        shutil.copyfile(path, folder / path.name)
        (folder / path.name).chmod(0o755)


def find_library(name: str) -> str:
    """Return the path of a library that the limiter loads."""
    told = subprocess.run(["ldd", built() / "limiter.bin"], capture_output=True, text=True, check=True).stdout
    return next(words[2] for line in told.splitlines() if (words := line.split())[0] == name)


def uuid_of(ordinal: int) -> str:
    """Return the uuid that quick.c tells of a device."""
    return f"GPU-{uuid.UUID(bytes=bytes([0x11 * (ordinal + 1)]) * 16)}"


def limited(limit_bytes: int, ordinal: int = 0, context_bytes: int = 0) -> Part:
    """Return a part of a device of quick.c."""
    return Part(uuid_of(ordinal), limit_bytes, context_bytes)


class Limited:
    """A segment of these parts, and the processes of one attempt under it."""

    def __init__(self, folder: Path, *parts: Part) -> None:
        self.built = built()
        self.folder = folder
        self.segment = Segment.create(folder / "segment", parts)
        self._counted = folder / "quick"
        self._counted.write_bytes(bytes(struct.calcsize(f"@{2 + 2 * DEVICES}Q")))
        self.environment = {
            "LD_LIBRARY_PATH": str(self.built),
            "LD_PRELOAD": str(self.built / "limiter.bin"),
            "MOORAGE_LIMITER": str(self.segment.path),
            FOLDER_VARIABLE: str(folder),
            "PATH": os.environ["PATH"],
        }

    def said(self, *words: str, route: str = "link", environment: Mapping[str, str] | None = None) -> list[str]:
        """Return what app.c says to these words."""
        return self.outputs([str(self.built / "app"), route, *words], environment)

    def outputs(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        done = subprocess.run(argv, env={**self.environment, **(environment or {})}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr or done.returncode
        assert not done.stderr, done.stderr
        return list(done.stdout.splitlines())

    @contextlib.contextmanager
    def running(self, *words: str, says: int) -> Iterator[subprocess.Popen[str]]:
        """Have app.c run meanwhile, from when it has said so many lines on; what is left of it is killed."""
        argv = [str(self.built / "app"), "link", *words]
        with subprocess.Popen(argv, env=self.environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                for _ in range(says):
                    assert process.stdout.readline()
                yield process
            finally:
                process.kill()

    def held(self, ordinal: int = 0) -> tuple[int, int]:
        """Return what all processes hold of a device by the driver's own count, and the most that they held at once."""
        with self._counted.open("r+b") as file, mmap.mmap(file.fileno(), 0) as counted:
            numbers = struct.unpack_from(f"@{2 + 2 * DEVICES}Q", counted)
        return numbers[1 + ordinal], numbers[1 + DEVICES + ordinal]

    def close(self) -> None:
        self.segment.close()
