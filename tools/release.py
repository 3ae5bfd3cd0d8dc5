"""Prove what `make dist` made, as far as this machine can: `python -m tools.release [--trial] [FOLDER]`.

It says what stands against a publication, installs each file in an empty environment of each Python that is here, runs
a fleet and a job from it, and writes `SHA256SUMS`. With `--trial` what stands against a publication is said alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from moorage.schemas.release import RELEASE
from moorage.system.build import build
from tools import changelog
from tools.dist import FOLDER_DEFAULT, PLACEHOLDER, ROOT

PYTHONS: Final = ("python3.11", "python3.12", "python3.13")
COMMAND_S_MAX: Final = 600.0
#: files that say from whose images ours is made, and which ones it runs beside
NAME_IMAGES: Final = ("deploy/Dockerfile", "deploy/compose.yml")
#: in them, an image that has a name of its own, with its digest if it has one
_IMAGE: Final = re.compile(
    r"^(?:ARG PYTHON=| *image: \$\{\w+:-)(?P<name>[^@}\s]+)(?P<digest>@sha256:[0-9a-f]{64})?", re.M
)
#: ours: this release's own build
OUR_IMAGE: Final = "moorage"
#: from an empty folder: a fleet comes up, a job gets its GPU, all of it ends
SMOKE: Final = """
set -e
moorage up --port 0 --simulate 1x2xH100 2>up.log & up=$!
until grep -q "^Ctrl-C ends" up.log; do kill -0 $up; sleep 0.2; done
moorage run --gpu 1xH100 -- echo "a GPU from $(moorage --version)"
moorage doctor >doctor.txt || { cat doctor.txt; exit 1; }
kill $up
wait $up
"""


def unpinned() -> Iterator[str]:
    """Yield which images of others are named by a tag alone, which their publisher may move at any time."""
    for file in NAME_IMAGES:
        for image in _IMAGE.finditer((ROOT / file).read_text()):
            if image["digest"] is None and image["name"] != OUR_IMAGE:
                yield (
                    f"{file} names {image['name']} without its digest: write {image['name']}@sha256:…, as "
                    f"docker buildx imagetools inspect {image['name']} tells it"
                )


def against(dist: Path) -> Iterator[str]:
    """Yield what stands against publishing the files in a folder."""
    if build() != RELEASE:
        yield f"this tree is {build()}: release {RELEASE} is a commit with the tag v{RELEASE} and no change beside it"
    text = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(RELEASE)}, \d{{4}}-\d\d-\d\d$", text, re.MULTILINE):
        yield f"CHANGELOG.md gives {RELEASE} no date: python -m tools.changelog {RELEASE} DATE"
    if left := changelog.files():
        yield f"changes/ has {len(left)} files that CHANGELOG.md lacks: python -m tools.changelog {RELEASE} DATE"
    yield from unpinned()
    sdists = list(dist.glob("moorage-*.tar.gz"))
    if len(sdists) != 1:
        yield f"{dist} has {len(sdists)} sdists: make dist"
        return
    with tarfile.open(sdists[0]) as archive:
        [info] = (member for member in archive.getmembers() if re.fullmatch(r"[^/]+/PKG-INFO", member.name))
        file = archive.extractfile(info)
        assert file is not None
        metadata = file.read().decode()
    if PLACEHOLDER in metadata:
        yield f"{sdists[0].name} names {PLACEHOLDER} for the project's address: make dist HOME_URL=https://…"
    if (named := Parser().parsestr(metadata)["Version"]) != build():
        yield f"{sdists[0].name} is of {named}, this tree is {build()}: make dist"


def pythons() -> list[str]:
    """Return the Pythons that moorage is for and that are here, also those of pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for name in PYTHONS:
        places = [name, *sorted(str(each) for each in versions.glob(f"*/bin/{name}"))]
        if works := next((place for place in places if _runs(place)), ""):
            found.append(works)
        else:
            print(f"left out: {name} is not here")
    return found


def _runs(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", "import venv"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def smoke(python: str, file: Path) -> None:
    """Install a file into an empty environment and run a job from it. Raises SystemExit with what was written."""
    with TemporaryDirectory(prefix="moorage-smoke-") as folder:
        env = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        env |= {"HOME": folder, "PATH": f"{folder}/venv/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        install = ["venv/bin/pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"{file}[server]"]
        for command in ([python, "-m", "venv", "venv"], install, ["sh", "-c", SMOKE]):
            done = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False
            )
            if done.returncode:
                raise SystemExit(f"{file.name} on {python}: {command[:3]} ended with {done.returncode}:\n{done.stderr}")
        print(f"{file.name} on {Path(python).name}: {done.stdout.splitlines()[0]}")


def write_sums(dist: Path) -> Path:
    """Write the digests of all files in a folder, as `sha256sum --check SHA256SUMS` reads them."""
    files = sorted(file for file in dist.iterdir() if file.is_file() and file.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (dist / "SHA256SUMS").write_text("".join(lines))
    return dist / "SHA256SUMS"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release")
    parser.add_argument("--trial", action="store_true", help="go on if something stands against a publication")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / FOLDER_DEFAULT)
    given = parser.parse_args()
    dist = given.folder.resolve()
    found = list(against(dist))
    for each in found:
        print(f"not to be published: {each}", file=sys.stderr)
    if found and not given.trial:
        return 1
    for file in sorted([*dist.glob("moorage-*.tar.gz"), *dist.glob("moorage-*.whl")]):
        for python in pythons():
            smoke(python, file)
    print(f"wrote {write_sums(dist)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
