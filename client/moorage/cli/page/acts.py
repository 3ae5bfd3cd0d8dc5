"""Operators' acts on the page: the form for them, and what they do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from moorage.cli.page.templates import drawn, link
from moorage.client.errors import Rejected, rejected
from moorage.client.login import who
from moorage.schemas.errors import Refused
from moorage.schemas.operate import ACTS, act_of

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient


def _that_need(**about: str) -> tuple[str, ...]:
    """Return the verbs of acts that need no more than the name of what they are for."""
    found = []
    for verb in ACTS:
        with contextlib.suppress(Refused):
            act_of(verb, dict(about))
            found.append(verb)
    return tuple(found)


OF_A_JOB: Final = _that_need(tenant="t", job="j")
OF_A_WORKER: Final = _that_need(worker="w")


def form(token: str, name: str, **about: str) -> Markup:
    """Return the form of what can be ordered of a job or of a worker; the name has to be typed."""
    verbs = OF_A_JOB if "job" in about else OF_A_WORKER
    return drawn("forms", "order", name=name, hidden=[*about.items(), ("token", token)], verbs=verbs)


async def do(client: AsyncClient, asked: Mapping[str, str], name: str) -> tuple[str, str]:
    """Do what a form asks, in the name of who sent it, and return what was done and the page to go back to.

    Raises `Rejected` if the typed name is another one or the leader refuses, and what `Admin` raises.
    """
    verb, worker, tenant, job = (asked.get(key, "") for key in ("verb", "worker", "tenant", "job"))
    if verb not in (OF_A_JOB if job else OF_A_WORKER) or not (job or worker):
        raise rejected(
            "invalid-argument",
            "the page has no such order",
            found=verb,
            allowed=", ".join(OF_A_JOB if job else OF_A_WORKER),
            next="moorage help has all orders",
        )
    if asked.get("typed", "").strip() != (job or worker):
        raise rejected(
            "invalid-argument",
            "the name that was typed is not that of what the order is for",
            found=asked.get("typed", ""),
            allowed=job or worker,
            next="go back, and type the name",
        )
    of = {"tenant": tenant, "job": job} if job else {"worker": worker}
    try:
        act = act_of(verb, {**of, "by": name or who(), "why": asked.get("why", "")})
    except Refused as refused:
        raise Rejected(refused.problem) from None
    done = await client._wire.act(verb, act)
    told = f"{verb} {job or worker}" + ("" if done.changed else " (nothing had to change)")
    return told, link("job", tenant, job) if job else link("worker", worker)
