"""Dead letters: what lands there, and list, show, resend and drop of it, by verb, SDK and command."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream, StoredMessage
from moorage.client import AsyncClient, NotFound, Rejected
from moorage.scheduler.durable import dead_letters
from moorage.scheduler.durable.dead_letters import LETTERS_MAX, DeadLetters
from moorage.schemas.answers.letters import LetterDone, LetterRow
from moorage.schemas.errors import problem
from moorage.schemas.subjects import Subjects
from tests.servers import Server
from tests.system.live.stack import ANSWER_S, Stack, caller, request, stack
from tests.unit.scheduler.driving import Driving
from tests.waiting import until

WAITS: dict[str, Any] = {"gpu": {"model": "none such"}}


async def buried(client: AsyncClient, count: int) -> list[LetterRow]:
    """The letters, once there are so many."""

    async def all_there() -> list[LetterRow] | None:
        rows = [row async for row in client.admin.dead_letters()]
        return rows if len(rows) == count else None

    found: list[LetterRow] = await until(all_there, ANSWER_S, f"{count} dead letters")
    return found


def operator(made: Stack) -> AsyncClient:
    return AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix, timeout=ANSWER_S)


@pytest.mark.slow
async def test_a_refused_request_is_listed_shown_mended_and_handed_in_again(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme, caller(made, "beta") as beta:
        await made.scheduler()
        await acme.leader()
        queued = [
            await acme.queue("submit", {**request("typo", **WAITS), "gpus": 1}),
            await acme.queue("submit", b"\xff\xfenot a request"),
            await beta.queue("cancel", {"job": "not.an.id"}),
        ]
        async with operator(made) as ana:
            rows = await buried(ana, 3)
            assert sorted(row.queued for row in rows) == queued
            await until(lambda: len(acme.ended) == 2, ANSWER_S, "the refusals told to the tenant")
            assert acme.ended == {"typo": ["REJECTED"], f"q{queued[1]}": ["REJECTED"]}
            refused = await acme.api("show", {"job": "typo"})
            assert (refused["code"], refused["field"]) == ("not-found", "$.gpus")
            assert "its request in the durable queue was refused, invalid-argument" in refused["message"]
            by_verb = {(row.tenant, row.verb, row.job): row for row in rows}
            typo = by_verb["acme", "submit", "typo"]
            assert typo.code == "invalid-argument"
            assert typo.subject == made.subjects.request("acme", "submit")
            assert [row.tenant async for row in ana.admin.dead_letters(tenant="beta")] == ["beta"]
            whole = await ana.admin.dead_letter(typo.sequence)
            assert json.loads(whole.body)["gpus"] == 1
            assert whole.problem is not None
            assert whole.problem.field == "$.gpus"
            binary = next(row for row in rows if row.bytes == 15)
            assert (await ana.admin.dead_letter(binary.sequence)).data
            # as it came it is refused again, and stays
            with pytest.raises(Rejected):
                await ana.admin.resend(typo.sequence)
            assert len(await buried(ana, 3)) == 3
            done = await ana.admin.resend(typo.sequence, body=request("typo", **WAITS), why="a typo")
            assert (done.answer["job"], done.answer["state"]) == ("typo", "QUEUED")
            assert await acme.state("typo") == "QUEUED"
            assert await beta.state("typo") == ""
            await ana.admin.drop(binary.sequence, why="rubbish")
            for gone in (typo, binary):
                for act in (ana.admin.dead_letter, ana.admin.resend, ana.admin.drop):
                    with pytest.raises(NotFound):
                        await act(gone.sequence)
            assert [row.verb for row in await buried(ana, 1)] == ["cancel"]


@pytest.mark.slow
async def test_a_typo_and_its_correction_in_one_batch_make_a_job_that_nobody_is_told_is_refused(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        scheduler = await made.scheduler()
        await acme.leader()
        scheduler.stop()
        await acme.queue("submit", {**request("mended", **WAITS), "gpus": 1})
        await acme.queue("submit", request("mended", **WAITS))
        await acme.queue("submit", {**request("typo", **WAITS), "gpus": 1})
        scheduler.wake()
        await until(lambda: "typo" in acme.ended, ANSWER_S, "the refusal told to the tenant")
        await acme.reaches("mended", "QUEUED")
        assert acme.ended == {"typo": ["REJECTED"]}


@pytest.mark.slow
async def test_resent_twice_is_one_job_an_id_made_by_the_queue_is_kept_and_what_cannot_be_is_refused(
    nats_server: Server, unique: str
) -> None:
    """A conflict is resent under its id and refused; a request without an id keeps the name that the queue gave it."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"act": "burn"}, "$.act"),
        ({"act": "show"}, "$.sequence"),
        ({"act": "list", "sequence": 3}, "$.sequence"),
        ({"act": "list", "limit": 0}, "$.limit"),
        ({"act": "list", "tenant": "A.b"}, "$.tenant"),
        ({"act": "drop", "sequence": 1, "body": {}}, "$.body"),
        ({"act": "drop", "sequence": 10**30}, "$.sequence"),
        ({"act": "drop", "sequence": 1, "why": "a\nb"}, "$.why"),
        ({"act": "list", "other": 1}, "$.other"),
    ]
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        await acme.leader()
        nameless = await acme.queue("submit", {**request(None, **WAITS), "replicas": 0})
        await acme.submit("taken", **WAITS)
        await acme.queue("submit", request("taken", gpu={"model": "another"}))
        async with operator(made) as ana:
            rows = {row.code: row for row in await buried(ana, 2)}
            with pytest.raises(Rejected, match="taken"):
                await ana.admin.resend(rows["conflict"].sequence)
            assert (await ana.admin.dead_letter(rows["conflict"].sequence)).code == "conflict", "it stays"
            sequence = rows["invalid-argument"].sequence
            mended = request(None, **WAITS)
            both = await asyncio.gather(
                ana.admin.resend(sequence, body=mended), ana.admin.resend(sequence, body=mended), return_exceptions=True
            )
            jobs = [each.answer["job"] for each in both if isinstance(each, LetterDone)]
            assert set(jobs) == {f"q{nameless}"}
            assert all(isinstance(each, LetterDone | NotFound) for each in both), both
            assert sum(row.job == f"q{nameless}" for row in (await ana.ls()).jobs) == 1
        for body, field in wrong:
            answer = await acme.admin("dlq", body)
            assert (answer["kind"], answer["code"]) == ("error", "invalid-argument"), answer
            assert answer["field"].startswith(field), answer


def test_the_store_is_bounded_in_number_bytes_and_age() -> None:
    config = DeadLetters.stream(Subjects(), 1, 3600)
    assert (config["max_msgs"], config["max_bytes"], config["max_age"]) == (LETTERS_MAX, 64 << 20, 3600 * 10**9)
    assert config["discard"] == "old"


async def test_one_tenants_letters_drive_out_its_own_oldest_and_no_other_tenants(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "BYTES_MAX", 80_000)
    subjects, why = Subjects(unique), problem("invalid-argument", "not read")
    async with await connect(nats_server.url, "test") as world:
        jetstream = JetStream(world)
        await DeadLetters.ensure(jetstream, subjects, 1, 3600)
        letters = DeadLetters(jetstream, subjects, Driving().engine, lambda: None, lambda _: None, 1)
        kept: dict[str, list[int]] = {}
        for tenant, count, size in (("beta", 3, 100), ("acme", 40, 1000), ("gamma", 2, 100)):
            for number in range(1, count + 1):
                message = StoredMessage("queue", subjects.request(tenant, "submit"), number, "", bytes(size))
                assert await letters.keep(tenant, message, why)
        for stored in await jetstream.direct_get_batch(subjects.dead_letter_stream, seq=1):
            tenant = subjects.token(stored.subject, 1)
            kept.setdefault(tenant, []).append(msgspec.json.decode(stored.data)["sequence"])
        assert (kept["beta"], kept["gamma"]) == ([1, 2, 3], [1, 2])
        assert kept["acme"][-1] == 40
        assert 2 <= len(kept["acme"]) < 12
        await jetstream.delete_stream(subjects.dead_letter_stream)


@pytest.mark.slow
async def test_the_command_lists_shows_resends_and_drops(nats_server: Server, unique: str, tmp_path: Path) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        # the command speaks the usual prefix: a scheduler of its own under it is not shared with other tests
        await made.scheduler()
        await acme.leader()
        for number in range(3):
            await acme.queue("submit", {**request(f"bad-{number}", **WAITS), "gpus": 1})
        async with operator(made) as ana:
            rows = await buried(ana, 3)
        first, second, third = (str(row.sequence) for row in rows)
        mended = tmp_path / "mended.json"
        mended.write_bytes(msgspec.json.encode(request("bad-0", **WAITS)))
        await _expect(made, 0, "bad-2", "list")
        await _expect(made, 0, "unknown field", "show", second)
        await _expect(made, 0, "job bad-0 of tenant acme is QUEUED", "resend", first, "-f", str(mended))
        await _expect(made, 2, "unknown field", "resend", second)
        await _expect(made, 1, "2 dead letters, 2 refused again or no longer there", "resend", "all")
        await _expect(made, 1, f"dead letter {third}: Object contains unknown field", "resend", "all")
        await _expect(made, 2, "replaces one request", "resend", "all", "-f", str(mended))
        await _expect(made, 2, "is not the number of a refused request", "drop", "x")
        await _expect(made, 2, "no refused request is named", "drop")
        await _expect(made, 0, f"{second}\tdropped", "drop", f"{second},{third}", "--why", "test")
        await _expect(made, 3, f"dead letter {second} is gone", "show", second)
        out = await _expect(made, 0, "", "list", "--json")
        assert json.loads(out)["data"]["letters"] == []


async def _expect(made: Stack, code: int, says: str, verb: str, *words: str) -> str:
    """Run the command on this stack's prefix; both its outputs together."""
    script = (
        "import sys; from moorage.schemas import subjects; import moorage.client.connected as c;"
        "c.Subjects = lambda prefix='': subjects.Subjects(sys.argv[1]);"
        "from moorage.cli.main import main; main(sys.argv[2:])"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, made.subjects.prefix, "dlq", verb, *words, "--nats", made.url,
        env={**os.environ, "NO_COLOR": "1"}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    text = out.decode() + ("" if "--json" in words else err.decode())
    assert process.returncode == code, (verb, words, text, err.decode())
    assert says in text, (verb, words, text)
    return text
