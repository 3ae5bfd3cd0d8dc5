"""`moorage check worker`: the workers of the docs keep to the protocol, one that floods and forgets is told so."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.leftover import ends_with_the_test
from tests.system.cli.node import Node, environment, moorage, start
from tests.system.docs.driver import skip_without
from tests.system.docs.test_callers import INSTALL
from tests.unit.docs.markdown import DOCS, page

HOW_TO = DOCS / "how-to" / "write-a-worker.md"
#: what breaks three rules of the worker of the page
BREAKS = {
    "        if name in seen:  # it is sent until it is done\n            continue\n": "",
    '            await asyncio.sleep(joined["renew_s"] / 4)': "            pass",
    '"fence" if name in fenced else "exit"': '"exit"',
}


def python_worker(changed: Mapping[str, str]) -> str:
    (code,) = [block.body for block in page(HOW_TO).blocks if block.title == "worker.py"]
    for text, instead in changed.items():
        assert text in code
        code = code.replace(text, instead)
    return code


async def checked(folder: Path, *command: str) -> tuple[int, dict[str, Any]]:
    """Check the worker that this command starts; return the exit code, and each rule by its name."""
    checking = await start("check", "worker", "plain", "--json")
    assert checking.stdout is not None
    url = json.loads(await asyncio.wait_for(checking.stdout.readline(), 60))["url"]
    with (folder / "worker.log").open("wb") as log:
        worker = ends_with_the_test(
            await asyncio.create_subprocess_exec(
                *command, cwd=folder, env=environment(NATS_URL=url), stdout=log, stderr=log
            )
        )
    try:
        out, _ = await asyncio.wait_for(checking.communicate(), 300)
    finally:
        worker.kill()
        await worker.wait()
    assert checking.returncode is not None
    return checking.returncode, {rule["name"]: rule for rule in map(json.loads, out.splitlines())}


@pytest.mark.slow
async def test_the_worker_of_the_page_keeps_the_rules_and_one_that_breaks_three_is_told_which(tmp_path: Path) -> None:
    folders = [tmp_path / "right", tmp_path / "wrong"]
    for folder, changes in zip(folders, ({}, BREAKS), strict=True):
        folder.mkdir()
        (folder / "worker.py").write_text(python_worker(changes))
    right, wrong = await asyncio.gather(*(checked(folder, sys.executable, "worker.py") for folder in folders))
    assert right[0] == 0, right[1]
    assert {rule["verdict"] for rule in right[1].values()} == {"ok"}
    code, rules = wrong
    assert code == 1
    assert {"place", "pace", "lease"} <= {name for name, rule in rules.items() if rule["verdict"] == "fail"}
    assert all(rules["place"][word] for word in ("found", "allowed", "next"))
    assert re.fullmatch(r"\d+ times `fact` in .* each answered with not-leading", rules["pace"]["found"])
    assert rules["lease"]["found"] == "`exited` with the detail 'exit'"


@pytest.mark.slow
async def test_the_worker_in_javascript_keeps_the_rules(tmp_path: Path) -> None:
    source = DOCS / "examples" / "worker.mjs"
    skip_without(page(source, "<!-- needs: node npm -->"))
    (tmp_path / "worker.mjs").write_text(source.read_text())
    npm = await asyncio.create_subprocess_exec(*INSTALL.split(), cwd=tmp_path)
    assert await asyncio.wait_for(npm.wait(), 300) == 0
    code, rules = await checked(tmp_path, "node", "worker.mjs")
    assert (code, {rule["verdict"] for rule in rules.values()}) == (0, {"ok"}), rules


async def test_a_server_of_moorage_is_refused_and_one_that_nobody_runs(node: Node) -> None:
    ran = await moorage("check", "worker", "plain", "--server", node.url)
    assert ran.code == 1
    assert (
        "error[failed-precondition]: the server has a moorage ledger or scheduler: a scheduler leads there" in ran.err
    )
    assert "leave out --server" in ran.err
    ran = await moorage("check", "worker", "plain", "--server", "nats://127.0.0.1:1")
    assert (ran.code, "cannot-connect" in ran.err) == (5, True)
    assert (await moorage("check", "worker", "a.b")).code == 2
