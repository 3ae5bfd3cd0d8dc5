"""The table of CDI specs, `tests/cdi_specs.py`, held against the three engines that it is about."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests import cdi_specs
from tests.engines import engine, path_26, why_no_docker_26
from tests.podmans import as_podman_5, in_namespace, podman_home, why_no_podman, why_no_podman_5

IMAGE: Final = "moorage-test:cdi"
PROGRAMS: Final = ("sh", "ls")
#: where podman looks, whatever its settings; a test has its own folders there, in a mount namespace
LOOKS_IN: Final = {cdi_specs.ETC: Path("/etc/cdi"), cdi_specs.RUN: Path("/run/cdi")}
#: runs a container that has these devices, and lists their files in /dev
Runs = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Folders with the files of the table, and the places for them where podman looks."""
    made = {name: tmp_path / name for name in LOOKS_IN}
    for folder in made.values():
        folder.mkdir()
    cdi_specs.write_all(made)
    new = [folder for folder in LOOKS_IN.values() if not folder.exists()]
    for folder in new:
        folder.mkdir()
    yield made
    for folder in new:
        with contextlib.suppress(OSError):  # another test has put something there
            folder.rmdir()


def words(devices: Sequence[str]) -> list[str]:
    asked = [word for name in devices for word in ("--device", name)]
    return ["run", "--rm", "--network=none", *asked, IMAGE, "sh", "-c", "ls /dev/moorage-case*"]


@contextlib.contextmanager
def docker_26(folders: Mapping[str, Path]) -> Iterator[Runs]:
    if why := why_no_docker_26():
        pytest.skip(why)
    config = {"features": {"cdi": True}, "cdi-spec-dirs": [str(folder) for folder in folders.values()]}
    with engine(config=config, path=path_26()) as made:
        made.make_image(IMAGE, programs=PROGRAMS)
        yield lambda devices: made.docker(*words(devices), check=False)


@contextlib.contextmanager
def podman(folders: Mapping[str, Path], within: Sequence[str] = ()) -> Iterator[Runs]:
    mounts = [f"mount --bind {folders[name]} {place}" for name, place in LOOKS_IN.items()]
    with podman_home(within=within) as home:
        home.make_image(IMAGE, *PROGRAMS)

        def run(devices: Sequence[str]) -> subprocess.CompletedProcess[str]:
            limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
            verb, *rest = words(devices)
            command = ["podman", *home.options, "--log-level=fatal", verb, *limits, *rest]
            return subprocess.run(
                [*within, *in_namespace(*mounts), *command], env=home.environment(), capture_output=True, text=True,
                check=False,
            )  # fmt: skip

        yield run


@contextlib.contextmanager
def podman_43(folders: Mapping[str, Path]) -> Iterator[Runs]:
    if why := why_no_podman():
        pytest.skip(why)
    with podman(folders) as runs:
        yield runs


@contextlib.contextmanager
def podman_54(folders: Mapping[str, Path]) -> Iterator[Runs]:
    if why := why_no_podman_5():
        pytest.skip(why)
    with podman(folders, as_podman_5()) as runs:
        yield runs


OPENS: Final = dict(zip(cdi_specs.ENGINES, (podman_43, docker_26, podman_54), strict=True))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", cdi_specs.ENGINES)
def test_an_engine_finds_the_devices_that_the_table_names_and_no_others(name: str, folders: dict[str, Path]) -> None:
    found = cdi_specs.expected(name)
    lost = [device for device in cdi_specs.asked() if device not in found]
    with OPENS[name](folders) as runs:
        shown = runs(list(found))
        assert shown.returncode == 0, shown.stderr
        assert set(shown.stdout.split()) == set().union(*found.values())
        if name == "podman 4.3":  # it names every device of a container if one of them is missing
            assert [device for device in lost if runs([device]).returncode == 0] == []
        else:
            _, _, told = runs(lost).stderr.partition("unresolvable CDI devices ")
            assert told.replace(",", " ").split()[: len(lost)] == lost
