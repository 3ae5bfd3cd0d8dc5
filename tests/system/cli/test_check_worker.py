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
from tests.system.docs.driver import has, skip_without
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
async def test_the_workers_of_the_docs_keep_the_rules_and_one_that_breaks_three_is_told_which(tmp_path: Path) -> None:
    """Side by side: each takes half a minute, in which it waits. Without node, those in Python are checked all the
    same."""
    script = DOCS / "examples" / "worker.mjs"
    in_js = page(script, "<!-- needs: node npm -->")
    commands = {"right": (sys.executable, "worker.py"), "wrong": (sys.executable, "worker.py")}
    if all(map(has, in_js.needs)):
        commands["js"] = "node", script.name
    for name in commands:
        (tmp_path / name).mkdir()
    (tmp_path / "right" / "worker.py").write_text(python_worker({}))
    (tmp_path / "wrong" / "worker.py").write_text(python_worker(BREAKS))
    if "js" in commands:
        (tmp_path / "js" / script.name).write_text(script.read_text())
        npm = await asyncio.create_subprocess_exec(*INSTALL.split(), cwd=tmp_path / "js")
        assert await asyncio.wait_for(npm.wait(), 300) == 0
    right, wrong, *js = await asyncio.gather(*(checked(tmp_path / name, *argv) for name, argv in commands.items()))
    for code, rules in (right, *js):
        assert (code, {rule["verdict"] for rule in rules.values()}) == (0, {"ok"}), rules
    code, rules = wrong
    assert code == 1
    assert {"place", "pace", "lease"} <= {name for name, rule in rules.items() if rule["verdict"] == "fail"}
    assert all(rules["place"][word] for word in ("found", "allowed", "next"))
    assert re.fullmatch(r"\d+ times `fact` in .* each answered with not-leading", rules["pace"]["found"])
    assert rules["lease"]["found"] == "`exited` with the detail 'exit'"
    skip_without(in_js)


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
