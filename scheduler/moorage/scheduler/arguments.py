"""Arguments of questions and cancels: which fields they may have, and the cancel that they ask for.

An unknown field is refused, as in requests and orders.

A misspelt field would otherwise be ignored, and the answer would be to another question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moorage.scheduler.core.events import Cancel
from moorage.scheduler.core.ledger.records import actor, by_tenant
from moorage.schemas.errors import refuse
from moorage.schemas.names import JOB, is_job
from moorage.schemas.ranges import Ranges, count_of, parse_ranges
from moorage.schemas.ways import person_of

REASON_CHARS_MAX: Final = 200
#: those of `ls`, `again`, `logs`, `use`, `plan`, `dlq` and of orders are known by their types
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "cancel": ("job", "reason", "by", "replicas", "before"),
    "uncancel": ("job",),
    "wake": ("service",),
    "services": (),
    "show": ("job", "events", "replicas"),
    "explain": ("job",),
    "history": ("job", "after_rev", "limit"),
    "usage": ("since_s", "by", "after", "waits", "job", "ever", "series", "worker", "service", "sizes", "promises"),
    "fleet": ("after", "worker"),
    "audit": (),
    "acts": ("since_s", "by", "verb", "after", "events"),
    "tenants": (),
}


def replicas_asked(arguments: Mapping[str, Any], most: int | None = None) -> Ranges | None:
    """Return the `replicas` that a question or cancel is about; None for all. Raises `Refused`, also for too many."""
    text = arguments.get("replicas")
    if text is None:
        return None
    allowed = "numbers and ranges, as in 0-99,205" + ("" if most is None else f", at most {most} replicas")
    try:
        if not isinstance(text, str):
            raise ValueError(allowed)
        found = parse_ranges(text)
    except ValueError as error:
        raise refuse(
            "invalid-argument", f"replicas must be {error}", field="$.replicas", found=text, allowed=allowed
        ) from None
    if most is not None and count_of(found) > most:
        count = count_of(found)
        raise refuse(
            "invalid-argument", f"{count} replicas at once", field="$.replicas", found=count, allowed=allowed,
            next="ask for fewer of them at a time",
        )  # fmt: skip
    return found


def check_job(verb: str, job: object) -> str:
    """Return the id of the job that a question or act is about. Raises `Refused` if it is none."""
    if not isinstance(job, str) or not is_job(job):
        raise refuse("invalid-argument", f"{verb} needs a job id", field="$.job", found=job, allowed=JOB.pattern)
    return job


def check_fields(verb: str, arguments: Mapping[str, Any]) -> None:
    """Raise `Refused` if `arguments` has a field that this verb does not know. Verbs not in `FIELDS` pass."""
    fields = FIELDS.get(verb)
    unknown = next((name for name in arguments if fields is not None and name not in fields), None)
    if unknown is not None:
        unknown = str(unknown)[:80]
        raise refuse(
            "invalid-argument",
            f"{verb} has no field `{unknown}`",
            field=f"$.{unknown}",
            found=unknown,
            allowed=", ".join(fields or ()) or "no field",
        )


def cancel_of(
    tenant: str, arguments: dict[str, Any], *, reply: str = "", json: bool = True, sequence: int = 0, came: str = ""
) -> Cancel:
    """Return the cancel that these arguments ask for: `job`, and optionally `reason`, `by`, the caller's name, and
    `before`. `came` is the way of the request.

    Raises `Refused` if `job` is no job id, and for a field that a cancel does not have.
    """
    check_fields("cancel", arguments)
    job = check_job("cancel", arguments.get("job"))
    reason = str(arguments.get("reason", "") or "cancelled")[:REASON_CHARS_MAX]
    by = actor(by_tenant(tenant, person_of(came, tenant)), arguments.get("by"))
    only, before = replicas_asked(arguments), arguments.get("before", False)
    if not isinstance(before, bool):
        raise refuse(
            "invalid-argument", "before must be true or false", field="$.before", found=before, allowed="true, false"
        )
    return Cancel(tenant, job, reason, by=by, reply=reply, json=json, sequence=sequence, replicas=only, before=before)


def uncancel_of(tenant: str, arguments: dict[str, Any], *, reply: str, json: bool) -> Cancel:
    """Return the event that forgets the cancel of an unknown job. Raises `Refused` as `cancel_of`."""
    check_fields("uncancel", arguments)
    return Cancel(tenant, check_job("uncancel", arguments.get("job")), "", reply=reply, json=json, lifts=True)
