"""`$SRV` discovery: which scheduler leads, what it answers and how it does, for `nats micro` and other clients.

It uses plain subscriptions, because nats-py's service framework cannot leave out its queue group: only the leader
answers, and every api subject is a plain one. Source: NATS ADR-32 (revision 6).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from moorage.bus.errors import PermissionRefused
from moorage.bus.transport import Delivery, Subscribed, Transport
from moorage.schemas.codec import encode
from moorage.schemas.release import RELEASE
from moorage.schemas.roles import may_answer
from moorage.schemas.subjects import API_VERBS, Subjects
from moorage.system.build import build

log = logging.getLogger("moorage.discovery")

SERVICE: Final = "moorage"
VERBS: Final = ("PING", "INFO", "STATS")
DESCRIPTION: Final = "NATS-native GPU scheduler: a job gets its GPU, once, whatever restarts"

Answer = Callable[[str, bytes], None]
Stats = Callable[[], dict[str, Any]]


class Discovery:
    """One leader as a service instance. `id` names its term; `stats` returns what STATS shows as `data`.

    `data` is in every endpoint, where ADR-32 has room for it. `counters` of them may hold `api.<verb>`, the
    requests by verb; errors and times are not kept by verb and are 0.
    """

    def __init__(self, subjects: Subjects, id: str, leader: str, answer: Answer, stats: Stats) -> None:
        self._endpoints = [(verb, subjects.api("*", verb)) for verb in API_VERBS]
        self._prefix = subjects.prefix
        self._answer = answer
        self._stats = stats
        self._started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self.id = id
        self._identity = {
            "name": SERVICE,
            "id": id,
            "version": RELEASE,
            "metadata": {"leader": leader, "prefix": subjects.prefix, "build": build()},
        }

    async def open(self, world: Transport) -> list[Subscribed]:
        """Subscribe to the nine subjects and return the subscriptions.

        Subjects without permission are logged and left out. So a user without permission for `$SRV` leads too, but is
        not discoverable.
        """
        opened: list[Subscribed] = []
        for verb in VERBS:
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{SERVICE}", f"$SRV.{verb}.{SERVICE}.{self.id}"):
                try:
                    opened.append(await world.subscribe(subject, self._on_delivery))
                except PermissionRefused as refused:
                    log.warning("the scheduler cannot be found as a NATS service: %s", refused)
        return opened

    def _on_delivery(self, delivery: Delivery) -> None:
        if delivery.reply and may_answer(self._prefix, delivery.subject, delivery.reply):
            self._answer(delivery.reply, encode(self.frame(delivery.subject.split(".")[1])))

    def frame(self, verb: str) -> dict[str, Any]:
        """Return the answer to PING, INFO or STATS."""
        frame: dict[str, Any] = {"type": f"io.nats.micro.v1.{verb.lower()}_response", **self._identity}
        if verb == "INFO":
            frame["description"] = DESCRIPTION
            frame["endpoints"] = [self._endpoint(name, subject, metadata={}) for name, subject in self._endpoints]
        elif verb == "STATS":
            stats = self._stats()
            frame["started"] = self._started
            frame["endpoints"] = [
                self._endpoint(
                    name,
                    subject,
                    num_requests=stats.get("counters", {}).get(f"api.{name}", 0),
                    num_errors=0,
                    last_error="",
                    processing_time=0,
                    average_processing_time=0,
                    data=stats,
                )
                for name, subject in self._endpoints
            ]
        return frame

    @staticmethod
    def _endpoint(name: str, subject: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "subject": subject, "queue_group": "", **more}
