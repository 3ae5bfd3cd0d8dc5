"""Which build a checkout, an archive of one and a wheel say that they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from moorage.schemas.release import RELEASE, minor_of
from moorage.system import build

ROOT: Final = Path(__file__).resolve().parents[3]
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    """Runs git in a new repository."""
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        **{f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "HOME": str(tmp_path),
    }

    def run(*words: str) -> str:
        command = ["git", "-C", str(tmp_path / "tree"), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "tree").mkdir()
    run("init", "--quiet")
    return run


def commit(git: Git, words: str) -> str:
    (Path(git("rev-parse", "--show-toplevel")) / "file").write_text(words)
    git("add", "file")
    git("commit", "--quiet", "--message", words)
    return git("rev-parse", "HEAD")[:7]


def test_a_commit_between_releases_is_numbered_and_named(git: Git, tmp_path: Path) -> None:
    root = str(tmp_path / "tree")
    assert build.of_checkout(root) == "", "there is no commit"
    for at, words in enumerate(("one", "two", "three"), start=1):
        of_commit = commit(git, words)
        assert build.of_checkout(root, "1.2.3") == f"1.2.3.dev{at}+g{of_commit}"
    git("tag", "v1.2.2")
    assert build.of_checkout(root, "1.2.3") == f"1.2.3.dev3+g{of_commit}", "an older release's tag"
    (tmp_path / "tree" / "other").write_text("not tracked")
    assert build.of_checkout(root, "1.2.3") == f"1.2.3.dev3+g{of_commit}"
    (tmp_path / "tree" / "file").write_text("changed")
    assert build.of_checkout(root, "1.2.3") == f"1.2.3.dev3+g{of_commit}.dirty"


@pytest.mark.parametrize("annotated", [("--annotate", "--message", "a release"), ()])
def test_the_tag_of_its_release_makes_a_commit_that_release(
    git: Git, tmp_path: Path, annotated: tuple[str, ...]
) -> None:
    root = str(tmp_path / "tree")
    of_commit = commit(git, "one")
    git("tag", *annotated, "v1.2.3")
    assert build.of_checkout(root, "1.2.3") == "1.2.3"
    (tmp_path / "tree" / "file").write_text("changed")
    assert build.of_checkout(root, "1.2.3") == f"1.2.3+g{of_commit}.dirty"
    later = commit(git, "two")
    assert build.of_checkout(root, "1.2.3") == f"1.2.3.post1+g{later}", "RELEASE is still that of the tag"
    assert build.of_checkout(root, "1.2.4") == f"1.2.4.dev2+g{later}"


def test_the_variables_of_a_git_hook_and_a_shallow_clone_do_not_mislead_it(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(git, "one")
    of_commit = commit(git, "two")
    git("clone", "--quiet", "--depth", "1", f"file://{tmp_path}/tree", str(tmp_path / "shallow"))
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))
    assert build.of_checkout(str(tmp_path / "tree"), "1.2.3") == f"1.2.3.dev2+g{of_commit}"
    assert build.of_checkout(str(tmp_path / "shallow"), "1.2.3") == f"1.2.3.dev0+g{of_commit}", "it cannot count"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_a_checkout_of_another_user_is_named(git: Git, tmp_path: Path) -> None:
    of_commit = commit(git, "one")
    for path in (tmp_path / "tree", *(tmp_path / "tree").rglob("*")):
        os.chown(path, 12345, 12345)
    assert build.of_checkout(str(tmp_path / "tree"), "1.2.3") == f"1.2.3.dev1+g{of_commit}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The two rooms that name a build, in a folder without git."""
    for room in ("schemas", "system"):
        inside = tmp_path / "alone" / room / "moorage" / room
        inside.mkdir(parents=True)
        for name in ("__init__.py", "release.py", "build.py"):
            if (source := ROOT / room / "moorage" / room / name).exists():
                shutil.copy(source, inside / name)
    return tmp_path / "alone"


def said(tree: Path, path: str) -> str:
    """What a tree says which build it is, in a process of its own with this PATH."""
    code = "from moorage.system.build import build; print(build())"
    env = {"PYTHONPATH": f"{tree}/schemas:{tree}/system", "PATH": path}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_what_is_installed_reads_its_file_and_asks_no_git(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    (tree / ".git").mkdir()
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    assert said(tree, path) == f"{RELEASE}.dev0"
    assert (tmp_path / "asked").exists()
    (tmp_path / "asked").unlink()
    (tree / "system" / "moorage" / "system" / build.FILE).write_text("1.2.3.dev4+gabcdef0\n")
    assert said(tree, path) == "1.2.3.dev4+gabcdef0"
    assert not (tmp_path / "asked").exists()


def test_a_tree_without_git_names_the_commit_that_git_archive_left(tree: Path) -> None:
    assert said(tree, "/nowhere") == f"{RELEASE}.dev0"
    (tree / ".git").mkdir()
    assert said(tree, "/nowhere") == f"{RELEASE}.dev0", "git is not installed"
    file = tree / "system" / "moorage" / "system" / "build.py"
    file.write_text(file.read_text().replace("$Format:%H$", "a87361689" + "0" * 31))
    assert said(tree, "/nowhere") == f"{RELEASE}.dev0+ga873616"
    assert "system/moorage/system/build.py export-subst" in (ROOT / ".gitattributes").read_text()


def test_each_build_is_of_the_release_beside_which_it_works() -> None:
    assert build.build() is build.build()
    assert minor_of(build.build()) == minor_of(RELEASE)
