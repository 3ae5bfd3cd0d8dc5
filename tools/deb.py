"""Make a Debian package, what is in it, and checksums: `python -m tools.deb [FOLDER]`, by default of and in `dist`.

The package has wheels of moorage and of all that its services need, for the Pythons of Debian 12 and 13; its scripts
(`deploy/debian`) install them without a network. It has the units of `deploy/systemd`, and a page of manual from the
command's own help. Beside it stands a list of all parts with their versions and licences, as CycloneDX has it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from moorage.cli.verbs import VERBS
from moorage.system.build import build
from tools.dist import FOLDER_DEFAULT, ROOT, run
from tools.reference_pages import help_of
from tools.release import write_sums

EXTRAS: Final = "server,metrics,page,http,nats-config"
#: of Debian 12 and 13
PYTHONS: Final = ("3.11", "3.13")
#: that pip takes a wheel for: all that Debian 12's C library can load
PLATFORMS: Final = (*(f"manylinux_2_{minor}" for minor in range(5, 37)), "manylinux1", "manylinux2010", "manylinux2014")
UNITS: Final = ROOT / "deploy" / "systemd"
SCRIPTS: Final = ROOT / "deploy" / "debian"
CONTROL: Final = """\
Package: moorage
Version: {version}
Architecture: amd64
Maintainer: moorage <nobody@invalid>
Installed-Size: {size}
Depends: python3 (>= 3.11), python3-venv, passwd
Section: admin
Priority: optional
Description: GPU scheduler that talks NATS
 Servers, schedulers, workers, metrics and page of moorage, with their systemd
 units. Nothing starts before a site's configuration is there.
"""


def version_of(build: str) -> str:
    """Return a build's name as Debian orders it: a development build is before its release."""
    return build.replace(".dev", "~dev")


def wheel_of(dist: Path) -> Path:
    """Return the wheel with the programs in a folder. Raises SystemExit unless it is there and of this tree's build."""
    wheels = sorted(dist.glob("moorage-*-manylinux*.whl"))
    for wheel in wheels:
        if (named := wheel.name.split("-")[1]) != build():
            raise SystemExit(f"{wheel} is of {named}, this tree is {build()}: make dist")
    if len(wheels) != 1:
        raise SystemExit(f"{dist} has {len(wheels)} wheels with the programs: make dist")
    return wheels[0]


def bring_wheels(dist: Path, into: Path) -> None:
    """Put the wheel with the programs, and the wheels of all that it needs, into a folder."""
    wheel = wheel_of(dist)
    shutil.copy(wheel, into)
    pip = (sys.executable, "-m", "pip")
    constraints = ("--quiet", "-c", ROOT / "constraints.txt")
    run(*pip, "wheel", *constraints, "--no-deps", "--wheel-dir", into, "nkeys")  # the index has only its sources
    for python in PYTHONS:
        target = (f"--python-version={python}", "--only-binary=:all:", *(f"--platform={at}_x86_64" for at in PLATFORMS))
        beside = f"{into} {os.environ.get('PIP_FIND_LINKS', '')}"
        run(*pip, "download", *constraints, *target, "--dest", into, f"{wheel}[{EXTRAS}]", PIP_FIND_LINKS=beside)


def manual() -> str:
    """Return the page of manual: the help of the command and of each verb."""
    parts = ['.TH MOORAGE 1 "" "moorage" "User Commands"\n', ".SH NAME\nmoorage \\- GPUs for services that talk NATS\n"]
    parts.append(f".SH SYNOPSIS\n{_as_it_is(help_of())}")
    for title, verbs in VERBS.items():
        parts.append(f".SH {title.upper()}\n")
        parts += [f'.SS "moorage {verb.name}"\n{_as_it_is(help_of(*verb.name.split()))}' for verb in verbs]
    return "".join(parts)


def _as_it_is(text: str) -> str:
    """Return a text for a manual that keeps its lines."""
    lines = (line.replace("\\", "\\e").replace("-", "\\-") for line in text.splitlines())
    return "\n".join([".nf", *(f"\\&{line}" if line[:1] in (".", "'") else line for line in lines), ".fi", ""])


def filled(script: str) -> str:
    """Return a script of the package with this build and the extras that the package has wheels for."""
    return script.replace("@EXTRAS@", EXTRAS).replace("@BUILD@", build())


def tree_of(dist: Path, tree: Path) -> None:
    """Lay out the package's files in a folder."""
    wheels, units, page = tree / "usr/lib/moorage/wheels", tree / "usr/lib/systemd/system", tree / "usr/share/man/man1"
    doc, control = tree / "usr/share/doc/moorage", tree / "DEBIAN"
    for folder in (wheels, units, page, doc, control, tree / "usr/bin"):
        folder.mkdir(parents=True)
    bring_wheels(dist, wheels)
    for unit in (*UNITS.glob("*.service"), *UNITS.glob("*.timer")):
        shutil.copy(unit, units)
    (page / "moorage.1.gz").write_bytes(gzip.compress(manual().encode(), mtime=0))
    shutil.copy(ROOT / "LICENSE", doc / "copyright")
    (tree / "usr/bin/moorage").symlink_to("/opt/moorage/bin/moorage")
    for script in SCRIPTS.iterdir():
        (control / script.name).write_text(filled(script.read_text()))
        (control / script.name).chmod(0o755)
    files = sorted(file for file in (tree / "usr").rglob("*") if file.is_file() and not file.is_symlink())
    sums = (f"{hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()}  {file.relative_to(tree)}\n"
            for file in files)  # fmt: skip
    (control / "md5sums").write_text("".join(sums))
    size = sum(file.stat().st_size for file in files) // 1024
    (control / "control").write_text(CONTROL.format(version=version_of(build()), size=size))
    for place in tree.rglob("*"):
        if place.is_symlink():
            continue
        place.chmod(0o755 if place.is_dir() or (place.parent == control and place.name in _scripts()) else 0o644)
        os.utime(place, (_made_s(), _made_s()))


def _scripts() -> set[str]:
    return {script.name for script in SCRIPTS.iterdir()}


def _made_s() -> int:
    """Return the time of the commit that is checked out: two builds of it are the same."""
    told = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture_output=True, text=True, check=True)
    return int(told.stdout)


def make(dist: Path) -> list[Path]:
    """Make the package and its list of parts from the wheels in a folder, and return them.

    Raises SystemExit, and leaves the folder as it is, if the wheel is of another build.
    """
    wheel_of(dist)
    package, parts = dist / f"moorage_{version_of(build())}_amd64.deb", dist / f"moorage-{build()}.cdx.json"
    for older in (*dist.glob("moorage_*.deb"), *dist.glob("moorage-*.cdx.json")):
        older.unlink()
    with TemporaryDirectory(prefix="moorage-deb-") as folder:
        tree = Path(folder) / "tree"
        tree_of(dist, tree)
        run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", tree, package, SOURCE_DATE_EPOCH=str(_made_s()))
        environment = Path(folder) / "venv"
        run(sys.executable, "-m", "venv", environment)
        wheels = tree / "usr/lib/moorage/wheels"
        offline = ("--quiet", "--no-index", "--find-" + "links", wheels)
        run(environment / "bin/pip", "install", *offline, f"moorage[{EXTRAS}]=={build()}")
        run(environment / "bin/pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
        listed = ("environment", "--output-reproducible", "--of", "JSON", "--output-file", parts, environment)
        run(Path(sys.executable).parent / "cyclonedx-py", *listed)
    return [package, parts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.deb")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / FOLDER_DEFAULT)
    given = parser.parse_args()
    if shutil.which("dpkg-deb") is None:
        print("left out: dpkg-deb, which makes the package, is not here")
    else:
        for file in make(given.folder):
            print(file)
    print(write_sums(given.folder))
