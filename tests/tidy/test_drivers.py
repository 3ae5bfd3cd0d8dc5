"""No room knows a driver by its name: what a driver can do stands in its capabilities, and its code in its own file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moorage.schemas.capabilities import KNOWN
from moorage.worker.drivers import BUILT_IN
from tests.tidy.test_tidy import ROOMS, ROOT, parsed, sources

NAMES: Final = {*KNOWN, *BUILT_IN}
#: the drivers' own files: all of these may say the name of theirs
OWN: Final = {
    "worker/moorage/worker/drivers/process/driver.py": "process",
    "worker/moorage/worker/drivers/noop.py": "noop",
    "worker/moorage/worker/drivers/container/docker.py": "docker",
    "worker/moorage/worker/drivers/kubernetes/driver.py": "kubernetes",
    "worker/moorage/worker/drivers/vm/driver.py": "vm",
    "worker/moorage/worker/drivers/container/podman.py": "podman",
    "worker/moorage/worker/drivers/handler/driver.py": "handler",
    "schemas/moorage/schemas/handler.py": "handler",
}
#: where else the name of a driver stands, and why. Take away from it; add nothing to it
SAID: Final[dict[str, set[str]]] = {
    # the one table of the default driver, and of those whose workers tell no capabilities
    "schemas/moorage/schemas/capabilities.py": {"process", "noop", "handler"},
    # the one table of what those that come with moorage read of a request
    "schemas/moorage/schemas/driver_config.py": {
        "process",
        "noop",
        "handler",
        "docker",
        "podman",
        "vm",
        "kubernetes",
    },
    # the one table of those that come with moorage
    "worker/moorage/worker/drivers/__init__.py": {"noop", "docker", "podman", "vm", "kubernetes"},
    # hosts and jobs of published traces, for `moorage simulate`
    "testing/moorage/testing/simulate/world.py": {"process", "noop", "handler", "docker"},
    "testing/moorage/testing/simulate/trace.py": {"noop"},
    "testing/moorage/testing/simulate/openb_jobs.py": {"noop"},
    "testing/moorage/testing/simulate/philly.py": {"noop"},
    # a VM's driver takes uuids: numbers of devices change when one is handed on
    "worker/moorage/worker/settings.py": {"vm"},
    # of Apple's GPUs, a mode of a lease
    "schemas/moorage/schemas/gpu.py": {"vm"},
    # the same words, of no driver: attributes and a field of a file
    "testing/moorage/testing/bus/bus.py": {"handler"},
    "testing/moorage/testing/bus/processes.py": {"process"},
    "bus/moorage/bus/subscription.py": {"handler"},
}
#: where modules of a driver are imported outside of its folder: a service's own functions are one driver's whole
#: purpose; a simulated fleet has those that run nothing
IMPORTED: Final[dict[str, set[str]]] = {
    "testing/moorage/testing/sim_fleet.py": {"handler", "noop"},
    "worker/moorage/worker/agent/embed.py": {"handler"},
}


def said(file: Path) -> Iterator[str]:
    """The names of drivers that are string constants of a file."""
    text = file.read_text()
    for node in ast.walk(parsed(file)) if any(f'"{name}"' in text for name in NAMES) else ():
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield str(node.value)


def imported(file: Path) -> Iterator[str]:
    """The drivers whose modules a file imports."""
    for node in ast.walk(parsed(file)) if "moorage.worker.drivers." in file.read_text() else ():
        module = node.module if isinstance(node, ast.ImportFrom) else None
        name = (module or "").removeprefix("moorage.worker.drivers.").partition(".")[0]
        if (module or "").startswith("moorage.worker.drivers.") and name in NAMES and file.parent.name != name:
            yield name


def files() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        for file in sources(room):
            name = str(file.relative_to(ROOT))
            if name not in OWN:
                yield name, file


def test_no_file_but_its_own_says_the_name_of_a_driver() -> None:
    assert {name: set(said(file)) for name, file in files() if set(said(file))} == SAID
    for name, driver in OWN.items():
        assert set(said(ROOT / name)) <= {driver}, name


def test_no_file_but_these_imports_a_driver() -> None:
    found = {name: set(imported(file)) for name, file in files()}
    assert {name: drivers for name, drivers in found.items() if drivers} == IMPORTED


def test_a_driver_is_one_file_and_one_line() -> None:
    """What names noop beside its own file: its line among the drivers, what it reads, what clients know of it."""
    naming = [name for name, file in files() if "noop" in said(file) and "simulate" not in name]
    assert sorted(naming) == [
        "schemas/moorage/schemas/capabilities.py",
        "schemas/moorage/schemas/driver_config.py",
        "worker/moorage/worker/drivers/__init__.py",
    ]
