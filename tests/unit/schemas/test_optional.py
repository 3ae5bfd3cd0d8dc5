"""The command that an error about a missing package names: it works for the Python that runs, as moorage came there."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas import optional
from moorage.schemas.errors import MoorageError
from moorage.schemas.optional import install_extra, pip_install

METADATA = """Metadata-Version: 2.4
Name: moorage
Version: 9.1.0
Provides-Extra: all
Provides-Extra: page
Requires-Dist: msgspec<1,>=0.20
Requires-Dist: starlette<2,>=1.0; extra == 'page'
Requires-Dist: uvloop<1; (sys_platform == 'linux') and extra == 'page'
Requires-Dist: moorage[page]; extra == 'all'
"""


@pytest.fixture(autouse=True)
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of Python whose pip is the one of PATH."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    (folder / "pip").touch(mode=0o755)
    monkeypatch.setattr(sys, "prefix", str(folder.parent))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder.parent


def came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: dict[str, Any] | None) -> None:
    """Have moorage installed as from this source, as pip records it; None for an index."""
    info = tmp_path / "site" / "moorage-9.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    if source is not None:
        (info / "direct_url.json").write_text(json.dumps(source))
    monkeypatch.syspath_prepend(tmp_path / "site")


def test_a_clone_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my clone").mkdir()
    url = f"file://{tmp_path}/my%20clone"
    came(tmp_path, monkeypatch, {"url": url, "dir_info": {}})
    assert install_extra("page") == "pip install './my clone[page]'"
    monkeypatch.chdir(tmp_path / "my clone")
    assert install_extra("page") == "pip install '.[page]'"
    monkeypatch.chdir("/")
    assert install_extra("page") == f"pip install '{tmp_path}/my clone[page]'"


def test_an_editable_clone_stays_editable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came(tmp_path, monkeypatch, {"url": f"file://{tmp_path}", "dir_info": {"editable": True}})
    assert install_extra("page") == "pip install -e '.[page]'"


def test_a_wheel_names_its_file_and_the_packages_once_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "moorage-9.1.0+gabc-py3-none-any.whl"
    wheel.touch()
    came(tmp_path, monkeypatch, {"url": f"file://{tmp_path}/moorage-9.1.0%2Bgabc-py3-none-any.whl", "archive_info": {}})
    assert install_extra("page") == f"pip install './{wheel.name}[page]'"
    wheel.unlink()
    assert install_extra("page") == "pip install 'starlette<2,>=1.0' 'uvloop<1'"


def test_what_uvx_runs_is_run_by_it_again_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of its cache serves one command, and the next one gets another."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "uv" / "archive-v0" / "Ndx7"))
    came(tmp_path, monkeypatch, {"url": f"file://{tmp_path}", "dir_info": {}})
    assert install_extra("page") == "uvx --from '.[page]' moorage …"


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (None, "pip install 'moorage[page]==9.1.0'"),
        (
            {"url": "https://example.com/m.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'moorage[page] @ git+https://example.com/m.git@abc'",
        ),
        (
            {"url": "https://example.com/m.whl", "archive_info": {}},
            "pip install 'moorage[page] @ https://example.com/m.whl'",
        ),
    ],
)
def test_an_index_a_repository_and_an_address_are_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: dict[str, Any] | None, command: str
) -> None:
    came(tmp_path, monkeypatch, source)
    assert install_extra("page") == command


def test_the_pip_of_this_python_is_named_whatever_the_path_has(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pip_install("a<2", "b") == "pip install 'a<2' b"
    monkeypatch.setenv("PATH", "/nowhere")
    assert pip_install("a") == "env/bin/pip install a"
    monkeypatch.chdir("/")
    assert pip_install("a") == f"{prefix}/bin/pip install a"
    (prefix / "bin" / "pip").unlink()
    assert pip_install("a") == f"{prefix}/bin/python -m pip install a"
    found = importlib.util.find_spec

    def without_pip(name: str) -> ModuleSpec | None:
        return None if name == "pip" else found(name)

    monkeypatch.setattr(optional, "find_spec", without_pip)
    monkeypatch.chdir(prefix)
    assert pip_install("a") == "uv pip install --python bin/python a"


def test_a_missing_package_is_told_with_its_command() -> None:
    with pytest.raises(MoorageError) as told:
        optional.optional("not_installed_here", distribution="not-installed")
    assert (told.value.problem.message, told.value.problem.next) == (
        "the package not_installed_here is missing",
        "pip install not-installed",
    )


def test_each_extra_that_an_error_names_is_one_of_moorage() -> None:
    extras = {line.partition("extra == ")[2].strip("'\"") for line in requires("moorage") or () if "extra ==" in line}
    known = {"server", "nats-config", "containers", "kubernetes", "metrics", "top", "mcp", "page", "http", "all"}
    assert extras >= known
