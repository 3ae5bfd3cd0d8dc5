"""The role `service` on the real server: what its key publishes and hears, who else may, and where answers may go.

The table is written by hand from the contract, not read from the code that makes the configuration.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from moorage.bus.connection import Connection
from moorage.bus.errors import NoResponders, PermissionRefused
from moorage.bus.transport import Delivery
from tests.sites import RunningSite, running, settled
from tests.system.deploy.rights import wrong_rights
from tests.waiting import until

LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "account-per-tenant": {},
    "shared-account": {"shared": True},
    "cluster": {"servers": 3},
    "cluster-shared": {"servers": 3, "shared": True},
}
#: those that act, by short names
WHO: Final = {
    "serves": "service.acme",
    "serves-beta": "service.beta",
    "acme": "submitter.acme",
    "beta": "submitter.beta",
    "w1": "worker.w1",
    "ana": "operator.ana",
    "graf": "observer.graf",
    "sched": "scheduler.main",
}
#: subject: who publishes to it, who subscribes to it
TABLE: Final[dict[str, tuple[str, str]]] = {
    "moorage.call.acme.embed": ("acme serves", "serves"),
    "moorage.call.acme.embed.cancel": ("acme serves", "serves"),
    "moorage.calls.acme.embed.have": ("serves", "serves"),
    "moorage.calls.acme.embed.want": ("serves", "serves"),
    "moorage.calls.acme.embed.load": ("serves", "serves sched"),
    "moorage.calls.acme.~.x.1": ("serves", "serves"),
    "moorage.call.acme": ("", ""),
    "moorage.calls.acme": ("", ""),
    "_INBOX.submitter.acme.x.1": ("serves sched", "acme"),
    "_INBOX.operator.ana.x.1": ("serves serves-beta sched", "ana"),
}
#: what a key of a service has nothing to do with
NOT_ITS: Final = (
    "moorage.api.acme.submit", "moorage.api.acme.show", "moorage.request.acme.submit", "moorage.events.acme",
    "moorage.event.acme.job-1", "moorage.log.acme.job-1.0", "moorage.history.acme", "moorage.admin.ana.drain",
    "moorage.worker.w1.wanted", "moorage.worker.w1.join", "moorage.hello.w1", "moorage.load.w1", "moorage.fleet.frame",
    "moorage.fleet.detail",
    "moorage.ledger.record", "$JS.API.INFO", "$JS.API.STREAM.INFO.MOORAGE_LEDGER", "$O.MOORAGE_FILES_acme.C.x",
    "$SYS.REQ.SERVER.PING", "$SRV.PING", "_INBOX.x.1", "_INBOX.submitter.beta.x.1", "_INBOX.worker.w1.x.1",
    "_INBOX.scheduler.main.x.1", "_INBOX.service.acme.x.1", "_R_.abc.1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_key_of_a_service_is_for_calls_of_its_tenant_alone(layout: str) -> None:
    tables = dict.fromkeys(WHO, TABLE) | {"serves": {**TABLE, **dict.fromkeys(NOT_ITS, ("", ""))}}
    wide = ("moorage.call.>", "moorage.calls.>", "moorage.calls.*.~.>", "moorage.call.*.embed", "_INBOX.>", ">")
    async with running(**LAYOUTS[layout]) as site:
        wrong = await wrong_rights(site, WHO, tables, wide)
        assert not wrong, "\n".join(wrong)


async def _witness(site: RunningSite, tenant: str) -> Connection:
    """A user with every right in the account of the tenant's services."""
    return await site.witness("MOORAGE" if site.site.shared else f"MOORAGE_TENANT_{tenant}")


@pytest.mark.parametrize("shared", [False, True])
async def test_a_call_is_answered_in_its_callers_inbox_and_on_no_subject_that_the_caller_chooses(shared: bool) -> None:
    """A member that answered wherever a call says would publish for its caller what the caller may not."""
    async with (
        running(shared=shared) as site,
        await _witness(site, "acme") as witness,
        await site.connect("submitter.acme") as acme,
        await site.connect("submitter.beta") as beta,
        await site.connect("service.acme") as member,
        await site.connect("service.beta") as other,
    ):
        heard: list[Delivery] = []
        listening = await witness.subscribe(">", heard.append)
        calls: list[Delivery] = []
        await member.subscribe("moorage.call.acme.embed", calls.append, "calls")
        await other.subscribe("moorage.call.beta.embed", lambda _: None, "calls")
        await settled(member, other, witness)

        async def answered(reply: str) -> bool:
            """Whether a plain member's answer to this call arrives anywhere, as it would with `allow_responses`."""
            before = len(calls)
            await acme.send([("moorage.call.acme.embed", b"?", reply)])
            await until(lambda: len(calls) > before)
            mark = reply.encode()
            await member.send([(calls[-1].reply, mark, "")])
            await settled(member, acme)
            await witness.send([("moorage.end", mark, "")])
            await until(lambda: any(each.subject == "moorage.end" and each.data == mark for each in heard))
            return any(each.data == mark for each in heard if each.subject != "moorage.end")

        assert await answered("_INBOX.submitter.acme.x.1")
        for subject in ("moorage.api.acme.cancel", "moorage.log.acme.job-1.0", "moorage.worker.w1.wanted",
                        "moorage.admin.ana.drain", "_INBOX.submitter.beta.x.1", "$JS.API.STREAM.PURGE.X"):  # fmt: skip
            assert not await answered(subject), subject
        await listening.unsubscribe()
        with pytest.raises((PermissionRefused, NoResponders)):
            await beta.request("moorage.call.acme.embed", b"?", 5.0)
        with pytest.raises(NoResponders):
            await acme.request("moorage.call.acme.nobody", b"?", 5.0)


@pytest.mark.parametrize("shared", [False, True])
async def test_the_scheduler_hears_what_members_have_to_do_and_nothing_else_of_them(shared: bool) -> None:
    async with (
        running(shared=shared) as site,
        await site.connect("scheduler.main") as scheduler,
        await site.connect("service.acme") as member,
    ):
        heard: list[Delivery] = []
        await scheduler.subscribe("moorage.calls.*.*.load", heard.append)
        await settled(scheduler, member)
        for subject in ("moorage.calls.acme.embed.have", "moorage.calls.acme.embed.load"):
            await member.send([(subject, b"said", "")])
        await until(lambda: heard)
        assert [each.subject for each in heard] == ["moorage.calls.acme.embed.load"]
