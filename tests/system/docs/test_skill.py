"""What an agent is told of moorage is enough: its tasks, typed as they stand, on a simulated fleet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.own_login import offer
from moorage.cli.framework.exit_codes import EXIT_CODES
from moorage.cli.verbs import VERBS
from moorage.schemas.job import TERMINAL
from tests.system.cli.node import Node
from tests.system.docs.driver import environment, run
from tests.unit.docs.markdown import DOCS, page

SKILL: Final = (DOCS / "SKILL.md").read_text()
AGENTS: Final = (DOCS.parent / "AGENTS.md").read_text()


@pytest.mark.slow
def test_its_tasks_are_done_as_they_are_typed(tmp_path: Path, fleet: Node) -> None:
    home = environment(tmp_path, MOORAGE_HOME=str(fleet.folder))
    offer(fleet.folder, fleet.url, home)  # as `moorage up` of this home would have
    run(page(DOCS / "SKILL.md"), tmp_path, home)


def test_it_names_verbs_states_and_exit_codes_that_there_are() -> None:
    verbs = {verb.name for group in VERBS.values() for verb in group}  # "admin" holds verbs; it is none
    assert set(re.findall(r"\bmoorage ([a-z]+) ", SKILL)) - {"has", "for", "admin"} <= verbs
    said = SKILL.partition("A state that ends a job is ")[2].partition(". ")[0]
    assert set(re.findall(r"[A-Z_]{4,}", said)) == set(TERMINAL)
    codes = SKILL.partition("## Exit codes")[2].partition("`run`")[0]
    assert {int(code) for code in re.findall(r"\b\d+\b", codes)} <= set(EXIT_CODES)


def test_what_an_agent_types_to_change_the_repository_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (DOCS.parent / "Makefile").read_text(), re.MULTILINE)
    for line in re.findall(r"^make ([a-z ]+[a-z])", AGENTS, re.MULTILINE):
        assert set(line.split()) <= set(targets), line
    for file in re.findall(r"\btests/\S+\.py\b", AGENTS):
        assert (DOCS.parent / file).is_file(), file
    for target in re.findall(r"\]\(([^)#]+)", AGENTS):
        assert (DOCS.parent / target).exists(), target
