"""The role `caller` on the real server, as a door that faces the internet has it: it calls, and may do nothing else.

The table is written by hand from the contract, not read from the code that makes the configuration.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.sites import running
from tests.system.deploy.rights import wrong_rights

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
    "_INBOX.submitter.acme.caller-door1.x.1": ("serves", "acme door"),
    "_INBOX.submitter.acme.caller-door2.x.1": ("serves", "acme other"),
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


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_callers_key_calls_its_tenants_services_and_hears_its_own_answers_alone(layout: str) -> None:
    tables = dict.fromkeys(WHO, TABLE) | {"door": {**TABLE, **dict.fromkeys(NOT_ITS, ("", ""))}}
    wide = ("moorage.call.>", "moorage.>", "_INBOX.>", "_INBOX.submitter.>", ">")
    async with running(callers=("acme.door1", "acme.door2"), **LAYOUTS[layout]) as site:
        wrong = await wrong_rights(site, WHO, tables, wide)
        assert not wrong, "\n".join(wrong)
