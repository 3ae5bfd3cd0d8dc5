"""What stands against a publication, and what is made for one."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from moorage.schemas.release import RELEASE
from moorage.system.build import build
from tools import deb, release
from tools.dist import PLACEHOLDER, ROOT, with_whole_links


def test_links_of_a_page_that_an_index_shows_are_whole() -> None:
    page = (
        "[a](docs/a.md#b) [b](https://h.example/c) ![p](docs/p.svg) [top](#top)\n"
        '<source srcset="docs/d.png"><img src="docs/e.png"> <img src="https://h.example/f.png">'
    )
    assert with_whole_links(page, "https://x.example/blob/v1", "https://x.example/raw/v1") == (
        "[a](https://x.example/blob/v1/docs/a.md#b) [b](https://h.example/c) ![p](https://x.example/raw/v1/docs/p.svg) "
        '[top](#top)\n<source srcset="https://x.example/raw/v1/docs/d.png">'
        '<img src="https://x.example/raw/v1/docs/e.png"> <img src="https://h.example/f.png">'
    )
    assert with_whole_links((ROOT / "README.md").read_text(), "a:", "b:").count("](docs/") == 0


def test_the_address_of_the_project_is_a_placeholder_in_the_tree() -> None:
    assert f'Homepage = "{PLACEHOLDER}"' in (ROOT / "pyproject.toml").read_text()


def test_nothing_is_published_without_files(tmp_path: Path) -> None:
    assert any("has 0 sdists: make dist" in each for each in release.against(tmp_path))


def sdist(folder: Path, version: str, home: str) -> None:
    """An sdist as far as its metadata go."""
    inside = folder / f"moorage-{version}"
    inside.mkdir()
    (inside / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: moorage\nVersion: {version}\n{home}\n")
    with tarfile.open(folder / f"moorage-{version}.tar.gz", "w:gz") as archive:
        archive.add(inside, inside.name)


def test_a_placeholder_another_build_and_what_the_changelog_lacks_stand_against_it(tmp_path: Path) -> None:
    sdist(tmp_path, "0.0.1", f"Project-URL: Homepage, {PLACEHOLDER}")
    told = "\n".join(release.against(tmp_path))
    assert f"names {PLACEHOLDER} for the project's address: make dist HOME_URL=" in told
    assert f"is of 0.0.1, this tree is {build()}: make dist" in told
    assert ("with the tag v" in told) == (build() != RELEASE)
    assert ("gives" in told) == (f"## {RELEASE}, unreleased" in (ROOT / "CHANGELOG.md").read_text())


def test_what_is_in_order_has_nothing_against_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "changes").mkdir()
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {RELEASE}, 2026-12-01\n\n- a: b.\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "build", lambda: RELEASE)
    monkeypatch.setattr("tools.changelog.files", list)
    (tmp_path / "deploy").mkdir()
    for file in release.NAME_IMAGES:
        text = (ROOT / file).read_text()
        for name in ("python:3.13-slim", "prom/prometheus:v3.5.0", "grafana/grafana:12.1.1"):
            text = text.replace(name, f"{name}@sha256:{'0' * 64}")
        (tmp_path / file).write_text(text)
    sdist(tmp_path, RELEASE, "Project-URL: Homepage, https://h.example/")
    assert list(release.against(tmp_path)) == []
    (tmp_path / "dist").mkdir()
    (tmp_path / f"moorage-{RELEASE}.tar.gz").rename(tmp_path / "dist" / f"moorage-{RELEASE}.tar.gz")
    sums = release.write_sums(tmp_path / "dist")
    assert release.write_sums(tmp_path / "dist").read_text().count("\n") == 1, "the sums are not summed"
    checked = subprocess.run(
        ["sha256sum", "--check", sums.name], cwd=sums.parent, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, f"moorage-{RELEASE}.tar.gz: OK\n")


def test_an_image_of_others_without_a_digest_stands_against_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deploy").mkdir()
    monkeypatch.setattr(release, "ROOT", tmp_path)
    pinned = f"@sha256:{'0' * 64}"
    (tmp_path / "deploy" / "Dockerfile").write_text("ARG PYTHON=python:3.13-slim\nFROM ${PYTHON} AS build\n")
    (tmp_path / "deploy" / "compose.yml").write_text(
        f"  image: ${{MOORAGE_IMAGE:-moorage}}\n    image: ${{ONE:-one/one:1{pinned}}}\n"
        f"    image: ${{TWO:-two/two:2}}\n    image: ${{THREE:-three:3@sha256:short}}\n"
    )
    told = [each.partition(" without its digest")[0] for each in release.unpinned()]
    assert told == [
        "deploy/Dockerfile names python:3.13-slim",
        "deploy/compose.yml names two/two:2",
        "deploy/compose.yml names three:3",
    ]


def test_a_package_is_made_of_this_build_alone(tmp_path: Path) -> None:
    older = tmp_path / "moorage_0.0.1_amd64.deb"
    older.touch()
    with pytest.raises(SystemExit, match=r"has 0 wheels with the programs: make dist"):
        deb.make(tmp_path)
    stale = tmp_path / "moorage-0.0.1-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
    stale.touch()
    with pytest.raises(SystemExit) as refused:
        deb.make(tmp_path)
    assert str(refused.value) == f"{stale} is of 0.0.1, this tree is {build()}: make dist"
    assert older.exists(), "what was made before stays"
    ours = stale.rename(tmp_path / stale.name.replace("0.0.1", build()))
    assert deb.wheel_of(tmp_path) == ours


def test_a_package_installs_what_its_commands_need() -> None:
    script = deb.filled((deb.SCRIPTS / "postinst").read_text())
    assert f"'moorage[{deb.EXTRAS}]=={build()}'" in script
    assert "@" not in script
    assert {"server", "page", "http"} <= set(deb.EXTRAS.split(",")), "http is what the door needs"
