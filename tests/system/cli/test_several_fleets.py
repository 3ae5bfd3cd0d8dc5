"""`--nats a --nats b`: one table of two fleets, and a line for one that does not answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moorage.cli.framework.options import Options
from moorage.cli.top.app import AskedPage, Picture, TopApp
from moorage.cli.top.draw import as_text
from moorage.cli.top.watched import OneOfSeveral
from tests.ports import free_ports
from tests.system.cli.node import Node, moorage, node_on
from tests.waiting import until


@pytest.mark.slow
async def test_several_fleets_are_one_table_and_one_that_is_away_is_a_line(node: Node, tmp_path: Path) -> None:
    [port] = free_ports(1)
    nobody = f"nats://127.0.0.1:{port}"
    async with node_on(tmp_path / "other", simulate="1x2xT4") as other:
        both = ("--nats", node.url, "--nats", other.url)
        for at in (node, other):
            assert (await at.run("run", "--job", f"on-{at.url.rpartition(':')[2]}", "--", "true")).code == 0
        env = {"MOORAGE_TIMEOUT": "5s"}

        ran = await moorage("fleet", *both, "--nats", nobody, env=env)
        header, *rows = ran.rows
        assert (ran.code, header[:2]) == (0, ["FLEET", "WORKER"])
        alone = {at.url: [row[0] for row in (await at.run("fleet")).rows[1:]] for at in (node, other)}
        assert [(row[0], row[1]) for row in rows] == [(url, name) for url, names in alone.items() for name in names]
        assert f"{nobody}: cannot reach NATS at {nobody}" in ran.err

        listed = await moorage("ls", *both, "--format", "{fleet} {job}", env=env)
        assert {f"{at.url} on-{at.url.rpartition(':')[2]}" for at in (node, other)} <= set(listed.out.splitlines())
        header, *_ = (await moorage("ls", *both, env=env)).rows
        assert header[:3] == ["FLEET", "TENANT", "JOB"]
        header, *_ = (await moorage("usage", *both, env=env)).rows
        assert header[:2] == ["FLEET", "TENANT"]

        (frame,) = (await moorage("fleet", *both, "--nats", nobody, "--json", env=env)).frames
        assert [each["fleet"] for each in frame["fleets"]] == [node.url, other.url, nobody]
        assert [sorted(each.keys() & {"data", "error"}) for each in frame["fleets"]] == [["data"], ["data"], ["error"]]
        assert frame["fleets"][2]["error"]["code"] == "cannot-connect"
        assert msgspec.json.encode(frame)

        ran = await moorage("fleet", "--nats", nobody, "--nats", nobody, env=env)
        assert (ran.code, ran.out) == (5, ""), "none answers"
        for words in (("show", "x"), ("cancel", "x"), ("fleet", "--watch")):
            ran = await moorage(words[0], *both, *words[1:], env=env)
            assert ran.code == 2, words
            assert "this asks one fleet, and --nats names several" in ran.err


@pytest.mark.slow
async def test_a_job_goes_to_the_fleet_where_it_starts_sooner_and_top_has_a_picture_of_each(
    node: Node, tmp_path: Path
) -> None:
    [port] = free_ports(1)
    nobody = f"nats://127.0.0.1:{port}"
    env = {"MOORAGE_TIMEOUT": "5s"}
    async with node_on(tmp_path / "other", simulate="1x2xT4") as other:
        both = ("--nats", node.url, "--nats", other.url)

        async def has(at: Node, job: str) -> bool:
            return (await at.run("show", job)).code == 0

        # the other fleet alone has such GPUs
        sent = await moorage("submit", *both, "--job", "t4", "--gpu", "2xT4", "--", "sleep", "600", env=env)
        assert (sent.code, sent.out) == (0, "t4\n"), sent.err
        assert f"{other.url}: starts now" in sent.err
        assert f"submitted to {other.url}" in sent.err
        assert [await has(at, "t4") for at in (node, other)] == [False, True]
        # once more: it is a job already, where it is
        again = await moorage("submit", *both, "--job", "t4", "--gpu", "2xT4", "--", "sleep", "600", env=env)
        assert (again.code, f"submitted to {other.url}" in again.err) == (0, True), again.err
        assert [await has(at, "t4") for at in (node, other)] == [False, True]
        # the other fleet is full
        full = await moorage("submit", "--nats", other.url, "--nats", node.url, "--job", "any", "--gpu", "1", "--",
                             "true", env=env)  # fmt: skip
        assert (full.code, f"submitted to {node.url}" in full.err) == (0, True), full.err
        # a job with an id may be in the fleet that does not answer
        words = ("submit", "--nats", node.url, "--nats", nobody)
        unsure = await moorage(*words, "--job", "mine", "--", "true", env=env)
        assert (unsure.code, await has(node, "mine")) == (5, False), unsure.err
        free = await moorage(*words, "--", "true", env=env)
        assert (free.code, f"{nobody}: cannot reach NATS" in free.err) == (0, True), free.err

        seen = await moorage("top", "--once", *both, "--nats", nobody, env=env)
        assert seen.code == 0
        assert [line for line in seen.out.splitlines() if line.startswith("== ")] == [
            f"== {url} ==" for url in (node.url, other.url, nobody)
        ]
        for option in (("--operate",), ("--at", "1h")):
            live = await moorage("top", *both, *option, env=env)
            assert (live.code, f"{option[0]} is about one fleet" in live.err) == (2, True)

        options = Options(timeout="5s")
        app = TopApp([OneOfSeveral(url, replace(options, nats=url)) for url in (node.url, nobody, other.url)])

        def text() -> str:
            return "\n".join(as_text(line) for line in app.screen_stack[0].query_one(Picture).lines)

        async with app.run_test(size=(160, 50)) as pilot:
            await until(lambda: list(app.screen_stack[0].query(Picture)), what="the picture is there to be asked")
            await until(
                lambda: "2 of 3 fleets answer" in text() and "t4" in text() and f"{nobody[-8:]}  cannot" in text(),
                what="two of them are seen, and why the third is not",
            )
            await pilot.press("colon", *"t4", "enter")
            await until(lambda: isinstance(page := app.screen, AskedPage) and "sleep 600" in page.text, what="its page")
