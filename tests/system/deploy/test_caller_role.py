"""The role `caller` on the real server, as a door that faces the internet has it: it calls, and may do nothing else.

The table is written by hand from the contract, not read from the code that makes the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any, Final

import msgspec
import pytest

from moorage.bus.connection import Connection
from moorage.bus.errors import NoResponders, PermissionRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import schedules_store
from moorage.bus.transport import Delivery
from moorage.schemas.subjects import Subjects
from tests.sites import running, settled
from tests.system.deploy.rights import wrong_rights
from tests.waiting import until

LAYOUTS: Final[dict[str, dict[str, Any]]] = {"account-per-tenant": {}, "shared-account": {"shared": True}}
WHO: Final = {
    "door": "caller.acme.door1",
    "other": "caller.acme.door2",
    "acme": "submitter.acme",
    "beta": "submitter.beta",
    "serves": "service.acme",
}
#: subject: who publishes to it, who subscribes to it
TABLE: Final[dict[str, tuple[str, str]]] = {
    "moorage.call.acme.embed": ("acme door other serves", "serves"),
    "moorage.call.acme.embed.cancel": ("acme door other serves", "serves"),
    "moorage.api.acme.wake": ("acme door other", ""),
    "moorage.api.acme.services": ("acme door other", ""),
    "_INBOX.submitter.acme.caller-door1.x.1": ("serves", "door"),
    "_INBOX.submitter.acme.caller-door2.x.1": ("serves", "other"),
    "_INBOX.submitter.acme.x.1": ("serves", "acme"),
}
NOT_ITS: Final = (
    "moorage.api.acme.submit", "moorage.api.acme.cancel", "moorage.api.acme.exec", "moorage.api.acme.ls",
    "moorage.api.acme.logs", "moorage.api.beta.wake", "moorage.request.acme.submit", "moorage.call.beta.embed",
    "moorage.calls.acme.embed.have", "moorage.calls.acme.embed.load", "moorage.calls.acme.~.x.1",
    "moorage.events.acme", "moorage.event.acme.job-1", "moorage.log.acme.job-1.0", "moorage.admin.ana.drain",
    "moorage.worker.w1.wanted", "moorage.fleet.frame", "$JS.API.INFO", "$O.MOORAGE_FILES_acme.C.x",
    "$SYS.REQ.SERVER.PING", "$SRV.PING", "_INBOX.x.1", "_INBOX.submitter.beta.x.1", "_INBOX.caller.acme.x.1",
)  # fmt: skip
#: all that a caller may publish to
ASKED: Final = (
    "moorage.call.acme.embed", "moorage.call.acme.embed.cancel", "moorage.call.acme.embed.ASK",
    "moorage.api.acme.wake", "moorage.api.acme.services",
)  # fmt: skip
#: what its tenant, the tenant's members, others and the server do or hear
FOREIGN: Final = (
    "$JS.moorage.API.STREAM.PURGE.OBJ_MOORAGE_SCHEDULES_acme", "$JS.API.STREAM.PURGE.OBJ_MOORAGE_SCHEDULES_acme",
    "$JS.moorage.API.STREAM.MSG.GET.OBJ_MOORAGE_FILES_acme", "$O.MOORAGE_FILES_acme.C.x",
    "$O.MOORAGE_SCHEDULES_acme.M.x",
    "moorage.request.acme.submit", "moorage.request.acme.cancel", "moorage.api.acme.submit", "moorage.api.acme.cancel",
    "moorage.api.beta.submit", "moorage.events.acme",
    "moorage.event.acme.job-1", "moorage.log.acme.job-1.0", "moorage.worker.w1.wanted", "moorage.admin.ana.drain",
    "moorage.ledger.record", "_INBOX.submitter.beta.x.1", "_INBOX.worker.w1.x.1", "_INBOX.scheduler.main.x.1",
    "$SYS.REQ.SERVER.PING", "_INBOX.x.1", "elsewhere",
)  # fmt: skip
#: what a member itself may say; that it does not say it for a caller is tested with real members, in test_door_by_key
OF_MEMBERS: Final = (
    "moorage.calls.acme.embed.have", "moorage.calls.acme.embed.want", "moorage.calls.acme.embed.load",
    "moorage.calls.acme.embed.turn", "moorage.calls.acme.~.x.1",
)  # fmt: skip
OWN: Final = "_INBOX.submitter.acme.caller-door1.x"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_callers_key_calls_its_tenants_services_and_hears_its_own_answers_alone(layout: str) -> None:
    tables = dict.fromkeys(WHO, TABLE) | {"door": {**TABLE, **dict.fromkeys(NOT_ITS, ("", ""))}}
    wide = ("moorage.call.>", "moorage.>", "_INBOX.>", "_INBOX.submitter.>", ">")
    async with running(callers=("acme.door1", "acme.door2"), **LAYOUTS[layout]) as site:
        wrong = await wrong_rights(site, WHO, tables, wide)
        assert not wrong, "\n".join(wrong)


def _echoing(connection: Connection, seen: list[Delivery], but: tuple[str, ...] = ()) -> Any:
    """Answer wherever a question says, as far as the server lets this key."""

    def on_question(delivery: Delivery) -> None:
        seen.append(delivery)
        if delivery.reply and delivery.reply not in but:
            sending.append(
                asyncio.get_running_loop().create_task(
                    connection.send([(delivery.reply, b"answer to " + delivery.data, "")])
                )
            )

    sending: list[asyncio.Task[int]] = []
    return on_question


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
async def test_no_answer_to_a_caller_is_an_order_of_its_tenant(servers: int) -> None:
    """The leader and a member answer here on every reply subject that they are let; witnesses hear each account."""
    async with contextlib.AsyncExitStack() as opened:
        site = await opened.enter_async_context(running(servers=servers, callers=("acme.door1", "beta.door")))
        heard: dict[bytes, set[tuple[str, str]]] = defaultdict(set)
        witnesses: dict[str, Connection] = {}
        for account in ("MOORAGE", "MOORAGE_TENANT_acme", "MOORAGE_TENANT_beta", "MOORAGE_LEDGER"):
            witness = witnesses[account] = await opened.enter_async_context(await site.witness(account))

            def note(delivery: Delivery, account: str = account) -> None:
                heard[delivery.data].add((account, delivery.subject))

            await witness.subscribe(">", note)
        store = schedules_store(JetStream(witnesses["MOORAGE"]), Subjects(), "acme", servers)
        await store.make_of(64 << 20)
        await store.append(store.subject("x"), b"kept")
        leader = await opened.enter_async_context(await site.connect("scheduler.main", on_error=lambda _: None))
        member = await opened.enter_async_context(await site.connect("service.acme", on_error=lambda _: None))
        door = await opened.enter_async_context(await site.connect("caller.acme.door1", on_error=lambda _: None))
        asked: list[Delivery] = []
        await leader.subscribe("moorage.api.*.*", _echoing(leader, asked))
        await member.subscribe("moorage.call.acme.>", _echoing(member, asked, OF_MEMBERS), "calls")
        answers: list[bytes] = []
        await door.subscribe(f"{OWN}.*", lambda delivery: answers.append(delivery.data))
        await settled(leader, member, door, *witnesses.values())

        marks = {f"{number}".encode(): reply for number, reply in enumerate(FOREIGN + OF_MEMBERS)}
        for subject in ASKED:
            for mark, reply in marks.items():
                said = mark + b" " + subject.encode()
                await door.send([(subject, said, reply), (subject, b"own " + said, f"{OWN}.1")])
        # behind each question its own is answered, on the same way as what its reply subject would have led to
        many = len(ASKED) * len(marks)
        await until(lambda: len(answers) >= many and len(asked) >= 2 * many, what="every question's answer")
        # behind what the door's server made of the answers, on the same routes
        await door.send([("moorage.api.acme.wake", b"end", ""), ("moorage.call.acme.embed", b"end", "")])
        ends = {("MOORAGE", "moorage.api.acme.wake"), ("MOORAGE_TENANT_acme", "moorage.call.acme.embed")}
        await until(lambda: heard[b"end"] >= ends)
        await settled(leader, member, *witnesses.values())

        led = sorted(
            f"{account} {subject}: {data.decode()}"
            for data, places in heard.items()
            for account, subject in places
            if data.startswith(b"answer to ") and not subject.startswith(("_R_.", f"{OWN}."))
        )
        assert led == []
        assert not [places for places in heard.values() if any("PURGE" in subject for _, subject in places)]
        told = await witnesses["MOORAGE"].request("$JS.API.STREAM.INFO.OBJ_MOORAGE_SCHEDULES_acme", b"", 5.0)
        assert msgspec.json.decode(told.data)["state"]["messages"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"servers": 3}, {"shared": True}], ids=str)
async def test_a_call_reaches_one_member_under_its_own_reply_subject_and_who_calls_nobody_is_told(
    settings: dict[str, Any],
) -> None:
    """So members and callers name a call alike: to cancel it, to ask for it, and to hand it on."""
    async with (
        running(callers=("acme.door1", "acme.door2"), **settings) as site,
        await site.connect("caller.acme.door1") as door,
        await site.connect("submitter.acme") as acme,
        await site.connect("service.acme") as one,
        await site.connect("service.acme") as two,
    ):
        with pytest.raises(NoResponders):
            await door.request("moorage.call.acme.embed", b"?", 5.0)
        calls: list[Delivery] = []
        for member in (one, two):
            await member.subscribe("moorage.call.acme.embed", calls.append, "calls")
        answers: list[Delivery] = []
        await door.subscribe(f"{OWN}.*", answers.append)
        overheard: list[Delivery] = []
        await acme.subscribe("_INBOX.submitter.acme.>", overheard.append)
        with pytest.raises(PermissionRefused):
            await acme.subscribe("_INBOX.submitter.acme.caller-door1.>", overheard.append)
        await settled(one, two, door, acme)
        await door.send([("moorage.call.acme.embed", b"%d" % number, f"{OWN}.{number}") for number in range(50)])
        await until(lambda: len(calls) >= 50)
        await settled(one, two)
        assert sorted(each.reply for each in calls) == sorted(f"{OWN}.{number}" for number in range(50))
        for part in range(20):
            await one.send([(f"{OWN}.7", b"part %d" % part, "")])
        await until(lambda: len(answers) == 20)
        assert [each.data for each in answers] == [b"part %d" % part for part in range(20)]
        await one.send([("_INBOX.submitter.acme.mine.1", b"to acme", "")])
        await until(lambda: overheard)
        assert [each.data for each in overheard] == [b"to acme"]
