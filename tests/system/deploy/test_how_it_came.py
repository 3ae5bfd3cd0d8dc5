"""What the ledger has of how requests and orders came, on a server with keys: by the server's own stamp where it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import find_binary
from moorage.bus.errors import BusError
from moorage.bus.jetstream import JetStream
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.ways import ACCEPTS, way_of
from moorage.schemas.roles import inbox
from moorage.schemas.subjects import Subjects
from moorage.schemas.ways import NO_REPLY, QUEUE, STAMP, SUBJECT
from tests.servers import ANSWER_S
from tests.sites import RunningSite, free_servers, running
from tests.system.deploy.test_queue_of_tenants import leads
from tests.waiting import until

SUBJECTS: Final = Subjects()


async def ways_of_jobs(site: RunningSite) -> dict[str, str]:
    """How each job of the ledger came, by its name."""
    found: dict[str, str] = {}
    async with await site.connect("ledger.main") as ledger:
        for message in await JetStream(ledger).direct_get_batch(SUBJECTS.ledger_stream, seq=1):
            record = decode_record(message.data)
            bodies = [each for _, flat in record.accepts for each in flat[1::4]]
            for at, body in enumerate(bodies):
                found[msgspec.json.decode(body)["job"]] = way_of(record.ways, record.notes, ACCEPTS, at)
    return found


def body_of(job: str) -> bytes:
    return msgspec.json.encode({"job": job, "gpu": {}, "run": {"argv": ["true"]}})


async def asks(of: Connection, subject: str, body: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode((await of.request(subject, body, ANSWER_S, headers)).data)
    return answer


async def test_a_request_has_the_account_and_the_key_that_the_server_stamped_whatever_its_sender_wrote() -> None:
    forged = {STAMP: '{"acc":"MOORAGE_TENANT_beta","user":"UFORGED"}'}
    async with running() as site, leads(site), await site.connect("submitter.acme") as acme:
        submit, queue = SUBJECTS.api("acme", "submit"), SUBJECTS.request("acme", "submit")
        assert (await asks(acme, submit, body_of("plain")))["kind"] == "accepted"
        assert (await asks(acme, submit, body_of("forged"), forged))["kind"] == "accepted"
        array = b"[" + b",".join(map(body_of, ("one", "two"))) + b"]"
        assert [each["kind"] for each in await asks(acme, submit, array)] == ["accepted"] * 2  # type: ignore[index]
        assert "error" not in await asks(acme, queue, body_of("queued"), forged)

        async def all_there() -> dict[str, str] | None:
            found = await ways_of_jobs(site)
            return found if len(found) == 5 else None

        ways = await until(all_there, ANSWER_S, "the jobs are in the ledger")
        accounts = (site.folder / "accounts.conf").read_text()
        assert ways.pop("queued") == QUEUE, "whatever its header says"
        [way] = set(ways.values())
        said, account, key = way.split(" ")
        assert (said, account) == ("import", "MOORAGE_TENANT_acme")
        assert f"# submitter acme\n      {{ nkey: {key}, " in accounts


@contextlib.asynccontextmanager
async def leaf_of(site: RunningSite, port: int, key: str, folder: Path) -> AsyncIterator[Connection]:
    """A client of a server of the tenant's own, which is a leaf node with its key."""
    [own] = free_servers(1)
    seed = (site.folder / "keys" / f"{key}.nk").read_text().strip()
    remote = f'{{ url: "nats-leaf://127.0.0.1:{port}", nkey: {seed} }}'
    file = folder / "leaf.conf"
    file.write_text(f'listen: "127.0.0.1:{own.port}"\nleafnodes {{ remotes: [ {remote} ] }}\n')
    leaf = await asyncio.create_subprocess_exec(find_binary(), "-c", str(file), stderr=asyncio.subprocess.DEVNULL)
    try:
        async with await connect(
            f"nats://127.0.0.1:{own.port}", "leaf", inbox_prefix=inbox("submitter", "acme"), give_up_after_s=ANSWER_S
        ) as connection:
            yield connection
    finally:
        leaf.kill()
        await leaf.wait()


async def test_what_comes_through_a_leaf_node_of_a_tenant_has_the_key_of_the_leaf(tmp_path: Path) -> None:
    """Its own server may write what it likes; the stamp is of the server that the account is on."""
    forged = {STAMP: '{"acc":"MOORAGE_TENANT_beta","user":"UFORGED"}'}
    [port] = [each.port for each in free_servers(1)]
    async with (
        running(leaf_port=port) as site,
        leads(site),
        leaf_of(site, port, "submitter.acme", tmp_path) as acme,
    ):

        async def is_accepted() -> bool:
            try:
                answer = await acme.request(SUBJECTS.api("acme", "submit"), body_of("j"), 1.0, forged)
            except BusError:  # the leaf is not connected yet
                return False
            return bool(msgspec.json.decode(answer.data)["kind"] == "accepted")

        await until(is_accepted, ANSWER_S, "the job is accepted")
        [way] = (await ways_of_jobs(site)).values()
        accounts = (site.folder / "accounts.conf").read_text()
        said, account, key = way.split(" ")
        assert (said, account) == ("import", "MOORAGE_TENANT_acme")
        assert f"# submitter acme\n      {{ nkey: {key}, " in accounts


async def test_an_order_says_whether_its_program_waited_for_an_answer() -> None:
    async with running() as site, leads(site), await site.connect("operator.ana") as ana:
        limit, acts = SUBJECTS.admin("limit", "ana"), SUBJECTS.admin("acts", "ana")
        forged = {STAMP: '{"acc":"MOORAGE_TENANT_beta","user":"UFORGED"}'}
        assert (await asks(ana, limit, b'{"tenant":"acme","gpus":3}', forged))["kind"] == "done"
        await ana.publish(limit, b'{"tenant":"acme","gpus":4}', "", forged)

        async def both() -> list[str] | None:
            rows = (await asks(ana, acts, b"{}")).get("data", {}).get("acts", [])
            return [row["came"] for row in rows] if len(rows) == 2 else None

        assert await until(both, ANSWER_S, "both orders are listed") == [SUBJECT, NO_REPLY]
