"""A `.moorageignore` leaves out what git leaves out by the same list: random lists, and git itself as the judge."""

from __future__ import annotations

import random
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Final

import pytest

from moorage.client.packing import IGNORE_FILE, pack

LISTS: Final = 300
FILES: Final = (
    *("a", "A1", "-a", "[a]", "a\\b", "!x", "#x", "ä", "foo ", "foo bar", "foobar", "README.md", "cache/x", "src/a"),
    *("src/cache/x", "src/cache/y.md", "data/README.md", "data/big.bin", "data/sub/note.md", "data/sub/deep/z"),
    *("foo/x/bar", "fooX/bar", "out/a.b", "out/ab/c", "logs/1.log"),
)
#: patterns that people write, and pieces of patterns that nobody does
WRITTEN: Final = (
    *("*", "!*/", "!*.md", "data/**", "!data/**/", "!data/**/*.md", "data/**/", "cache", "!/src/", "*.log", "/data/*"),
    *("!/data/sub", "foo/**/bar", "src/", "/src", "**/cache", "foo**/bar", "!cache", "!/data/", " ", "foo\\ ", "foo "),
)
PIECES: Final = (
    *("*", "**", "?", "a", "b", "foo", "bar", "/", "/", "x", "[a-c]", "[!a]", "[^b]", "[[:alpha:]]", "[[:digit:]x]"),
    *("[]x]", "[a", "\\", "\\a", "\\*", " ", "src", "cache", "data", "sub", "README.md", "*.md", ".", "-", "[z-a]"),
    *("[a-]", "[\\]x]", "!", "#", "**/", "/**", "/**/", "out", "*.log", "ä", "[ä]", "[[:foo:]]", "[[:x]", "[!/]", "\t"),
)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def pattern(chance: random.Random) -> str:
    written = chance.random() < 0.5
    text = chance.choice(WRITTEN) if written else "".join(chance.choices(PIECES, k=chance.randint(1, 5)))
    return chance.choice(("", "", "", "!")) + text + chance.choice(("", "", "", "", "/", " ", "\r"))


def brought(folder: Path) -> set[str]:
    with pack([folder]).file as file:
        file.seek(0)
        archive = tarfile.open(fileobj=file)  # noqa: SIM115 - of a file that is closed here
        return {member.name for member in archive if not member.isdir()} - {IGNORE_FILE}


def test_random_lists_leave_out_what_git_leaves_out(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    lists = [
        "\n".join(pattern(chance) for _ in range(chance.randint(1, 3))) + chance.choice(("\n", ""))
        for _ in range(LISTS)
    ]
    for at, text in enumerate(lists):
        for name in FILES:
            (tmp_path / str(at) / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(at) / name).touch()
        (tmp_path / str(at) / IGNORE_FILE).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    asked = ["git", "ls-files", "-o", "-z", f"--exclude-per-directory={IGNORE_FILE}"]
    listed = subprocess.run(asked, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    of_git: dict[str, set[str]] = {str(at): set() for at in range(LISTS)}
    for path in listed.split("\0")[:-1]:
        folder, _, name = path.partition("/")
        of_git[folder].add(name)
    differences = {text: brought(tmp_path / str(at)) ^ of_git[str(at)] for at, text in enumerate(lists)}
    wrong = {text: names for text, names in differences.items() if names - {IGNORE_FILE}}
    assert not wrong, f"seed {seed}: {len(wrong)} of {LISTS} lists differ from git, as {next(iter(wrong.items()))}"


def test_a_list_in_a_folder_goes_before_the_one_above_it_as_with_git(tmp_path: Path) -> None:
    for name in ("data/keep.bin", "data/a.bin", "data/sub/a.txt", "b.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / IGNORE_FILE).write_text("*.bin\n")
    (tmp_path / "data" / IGNORE_FILE).write_text("!keep.bin\n/sub/\n")
    assert brought(tmp_path) == {f"data/{IGNORE_FILE}", "data/keep.bin"}
