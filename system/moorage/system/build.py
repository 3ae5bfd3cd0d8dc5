"""The build that runs: a release, or a commit between two of them.

An sdist and a wheel have it in `build.txt`, which `worker/build_hook.py` writes: nothing that is installed asks git.
A checkout asks git, once a process and only where the build is named.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Final

from moorage.schemas.release import RELEASE

_HERE: Final = os.path.dirname(os.path.abspath(__file__))
#: beside this file, in an sdist and in a wheel
FILE: Final = "build.txt"
#: the commit of a tree that `git archive` made, by .gitattributes
_ARCHIVED: Final = "$Format:%H$"
_COMMIT_CHARS: Final = 7
_GIT_S_MAX: Final = 10.0
_DESCRIBED: Final = re.compile(r"(?:v(?P<tag>.+)-(?P<after>\d+)-g)?(?P<commit>[0-9a-f]{7,40})(?P<dirty>-dirty)?")


@functools.cache
def build() -> str:
    """Return the version of this build, by PEP 440: at most 64 characters, the same for each process of it.

    It is `0.3.0` for a release and `0.3.0.dev3619+ga873616` for the commit a873616, which has 3,618 before it;
    `.dirty` follows if tracked files of the checkout differ from that commit. A tree without git and without the file
    is `0.3.0.dev0`.
    """
    try:
        with open(os.path.join(_HERE, FILE), encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:
        pass
    root = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
    if os.path.exists(os.path.join(root, ".git")) and (found := of_checkout(root)):
        return found
    archived = "" if _ARCHIVED.startswith("$") else f"+g{_ARCHIVED[:_COMMIT_CHARS]}"
    return f"{RELEASE}.dev0{archived}"


def of_checkout(root: str, release: str = RELEASE) -> str:
    """Return the build of a checkout; "" where git does not answer. Only the tag `v0.3.0` makes a build release 0.3.0.

    A commit after the tag of its own release is `0.3.0.post12+g…`: somebody forgot to raise `RELEASE`.
    """
    described = _git(
        root, "describe", "--always", "--tags", "--long", "--dirty", "--abbrev=7", "--match", f"v{release}"
    )
    if (found := _DESCRIBED.fullmatch(described)) is None:
        return ""
    commit = f"+g{found['commit'][:_COMMIT_CHARS]}{'.dirty' if found['dirty'] else ''}"
    if found["tag"] is None:
        is_shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
        return f"{release}.dev{0 if is_shallow else _git(root, 'rev-list', '--count', 'HEAD') or 0}{commit}"
    if found["after"] != "0":
        return f"{release}.post{found['after']}{commit}"
    return f"{release}{commit}" if found["dirty"] else release


def _git(root: str, *words: str) -> str:
    """Return what git answers about a checkout; "" where it does not. The checkout may be another user's."""
    import subprocess

    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # as inside of a hook
    command = ["git", "--no-optional-locks", "-c", "safe.directory=*", "-C", root, *words]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_GIT_S_MAX, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
