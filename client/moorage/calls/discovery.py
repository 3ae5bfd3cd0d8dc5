"""`$SRV` discovery of a member, for `nats micro ls` and `nats micro stats` (NATS ADR-32).

A key of the role `service` has no right on `$SRV`: a user that hears an operator's questions there knows the operator's
inbox, and could answer other questions of that operator. So members are found on servers without such permissions, or
where an operator gives that right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any, Final

from moorage.calls.member import Member
from moorage.schemas.codec import encode
from moorage.schemas.release import RELEASE
from moorage.schemas.service import QUEUE

VERBS: Final = ("PING", "INFO", "STATS")
PREFIX: Final = "$SRV"
_NS: Final = 1_000_000
#: what ADR-32 lets a version be
_SEMANTIC: Final = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")


class Discovery:
    """One member as an instance of a NATS service."""

    def __init__(
        self,
        member: Member,
        service: str,
        tenant: str,
        subject: str,
        endpoints: Callable[[], Collection[str]] = tuple,
        version: str = "",
    ) -> None:
        """`version` is what `VERSION_VARIABLE` says."""
        load = member.load(0.0)
        # of an attempt, which job it is of: versions of a service are jobs
        attempt = {"job": load.job, "replica": str(load.replica), "attempt": str(load.attempt)} if load.job else {}
        self._member = member
        self._subject = subject
        self._endpoints = endpoints
        self._started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._service = service
        digest, _, label = version.partition(",")
        said = {"request": digest, "version": label, "moorage": RELEASE}
        self._metadata = {
            "tenant": tenant,
            "by": "moorage serve",
            **attempt,
            **{name: value for name, value in said.items() if value},
        }
        self._identity = {
            "name": service,
            "id": member.name,
            "version": label if _SEMANTIC.fullmatch(label) else RELEASE,
            "metadata": self._metadata,
        }

    @property
    def subjects(self) -> list[str]:
        """The subjects on which it is asked."""
        names = ("", f".{self._service}", f".{self._service}.{self._member.name}")
        return [f"{PREFIX}.{verb}{name}" for verb in VERBS for name in names]

    def answer(self, asked: str, now_s: float) -> bytes:
        """Return the answer to a question on this subject: PING, INFO or STATS."""
        verb = asked.split(".")[1]
        frame: dict[str, Any] = {"type": f"io.nats.micro.v1.{verb.lower()}_response", **self._identity}
        endpoint: dict[str, Any] = {"name": "call", "subject": self._subject, "queue_group": QUEUE}
        if verb == "INFO":
            frame["metadata"] = {**self._metadata, "started": self._started}
            frame |= {
                "description": f"{self._service}, served by moorage",
                "endpoints": [
                    {**endpoint, **named, "metadata": {}}
                    for named in (
                        {},
                        *({"name": each, "subject": f"{self._subject}.{each}"} for each in self._endpoints()),
                    )
                ],
            }
        elif verb == "STATS":
            load, meter = self._member.load(now_s), self._member.meter
            taken = load.ended + load.refused + load.expired + load.handed
            endpoint |= {
                "num_requests": taken,
                "num_errors": meter.errors,
                "last_error": meter.last_error,
                "processing_time": load.ran_ms * _NS,
                "average_processing_time": load.ran_ms * _NS // max(1, load.ended),
                "data": load,
            }
            frame |= {"started": self._started, "endpoints": [endpoint]}
        return encode(frame)
