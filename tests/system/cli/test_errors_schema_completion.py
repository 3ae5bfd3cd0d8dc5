"""What is known without a server: codes, schemas, completion."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from moorage.bus.errors import BUS_CODES
from moorage.cli.framework.codes import FIXES, NOTES, ends, error_codes, of_calls, reasons, states
from moorage.cli.framework.exit_codes import EXIT_OF_CODE
from moorage.cli.study.lookup import page
from moorage.cli.verbs import VERBS
from moorage.client.errors import CLIENT_CODES
from moorage.schemas.errors import CODES, ENDS
from moorage.schemas.reasons import REASONS
from moorage.schemas.service import CALL_ERRORS
from tests.system.cli.node import Node, environment, moorage
from tools.generate import schemas


def test_every_code_has_a_page_and_every_fix_and_exit_code_a_code() -> None:
    kinds = error_codes(), reasons(), ends(), of_calls()
    known = {name: code for kind in kinds for name, code in kind.items()}
    assert set(known) == {*CODES, *BUS_CODES, *CLIENT_CODES, *REASONS, *ENDS, *CALL_ERRORS}
    assert len(known) == sum(map(len, kinds)), "one word, one meaning"
    for code in known.values():
        text = page(code)
        assert code.means in text
        assert code.code in text
    assert set(FIXES) | set(NOTES) <= set(known)
    assert set(EXIT_OF_CODE) <= set(error_codes())


@pytest.mark.slow
async def test_errors_are_a_table_a_page_and_frames() -> None:
    table = await moorage("errors")
    assert table.rows[0] == ["CODE", "FAULT", "EXIT", "MEANS"]
    rows = {row[0]: row for row in table.rows}
    assert rows["not-found"][1:3] == ["caller", "3"]
    assert rows["gang-size"][1:3] == ["waiting", "-"]
    assert rows["start-failed"][1:3] == ["end", "-"]
    one = dict((await moorage("errors", "queue-full")).rows)
    assert (one["code"], one["exit code"]) == ("queue-full", "1")
    frame = (await moorage("errors", "busy", "--json")).frame
    assert (frame["kind"], frame["fault"], frame["exit_code"]) == ("code", "", None)
    assert frame["fix"]
    assert (await moorage("explain", "busy", "--json")).frame == frame
    assert (await moorage("explain", "TIMED_OUT")).out.startswith("TIMED_OUT: over: it ran longer than")
    assert "TIMED_OUT, the state of a job: over" in (await moorage("explain", "timed-out")).out, "which is an error"
    assert (await moorage("errors", "TIMED_OUT")).rows[1] == ["means", states()["TIMED_OUT"].means]
    assert ["kind", "what a caller of a service without the SDK hears, in Nats-Service-Error"] in (
        await moorage("errors", "expired")
    ).rows
    assert (await moorage("errors", "queue-full", "--format", "{code} {exit_code}")).out == "queue-full 1\n"


async def test_a_schema_is_the_one_that_the_documentation_has() -> None:
    names = (await moorage("schema")).out.split()
    assert {"request", "error", "event", "accepted", "hello", "wanted"} <= set(names)
    lines = (await moorage("schema", "--json")).out.splitlines()
    assert [msgspec.json.decode(line) for line in lines] == [{"kind": "schema", "name": name} for name in names]
    documented = next(text for path, text in schemas().items() if path.name == "event.json")
    assert (await moorage("schema", "event", "--json")).frame == msgspec.json.decode(documented)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_every_verb_and_can_be_read(shell: str, tmp_path: Path) -> None:
    script = asyncio.run(moorage("completion", shell)).out
    for verbs in VERBS.values():
        for verb in verbs:
            assert all(word in script for word in verb.name.split())
    assert ("-l gpu " if shell == "fish" else "--gpu") in script
    assert "python" not in script.lower()  # verbs and options stand in it: no interpreter starts for them
    if (found := shutil.which(shell)) is not None:
        file = tmp_path / shell
        file.write_text(script)
        subprocess.run([found, "-n", str(file)], check=True)


@pytest.mark.slow
async def test_a_tab_offers_the_jobs_and_the_workers_that_there_are(node: Node, unique: str, tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text((await moorage("completion", "bash")).out)
    for job in ("tab-one", "tab-two"):
        assert (await node.run("submit", "--job", job, "--", "true", tenant=unique)).code == 0
    worker = (await node.run("fleet", "--format", "{worker}")).out.split()[0]

    async def offered(*words: str) -> set[str]:
        line = " ".join(f"'{word}'" for word in ("moorage", *words))
        tab = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _moorage; printf '%s\n' \"${{COMPREPLY[@]}}\""
        bash = f"moorage() {{ '{sys.executable}' -m moorage.cli \"$@\"; }}; source '{script}'; {tab}"
        env = environment(**node.env(unique))
        return set((await asyncio.to_thread(subprocess.check_output, ["bash", "-c", bash], text=True, env=env)).split())

    assert await offered("cancel", "tab") == {"tab-one", "tab-two"}
    assert await offered("explain", "tab-t") == {"tab-two"}
    assert worker in await offered("drain", "")
    assert await offered("submit", "--after", "tab-t") == {"tab-two"}
    assert await offered("submit", "--gpu", "1", "--instead-of", "tab-o") == {"tab-one"}
    assert worker in await offered("plan", "--drain", "")
    assert await offered("cancel", "--rea") == {"--reason"}
    assert not [word for word in await offered("logs", "") if word.startswith("-")], "options only after a dash"
    assert "--no-follow" in await offered("logs", "-")
    for current in ("", "-", "--g"):
        assert await offered("run", "--gpu", "1", "--", "python", current) == set(), "the job's command is not ours"
