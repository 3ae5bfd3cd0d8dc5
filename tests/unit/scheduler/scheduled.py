"""What tenants ask of schedules, and the runs that nats-server publishes, offered to a core."""

from __future__ import annotations

from typing import Any

from moorage.scheduler.answers.schedules import schedule_row
from moorage.scheduler.core.events import ScheduleOrder, ScheduleRun
from moorage.scheduler.durable.due_times import latest_due_ms
from moorage.schemas.codec import encode
from moorage.schemas.schedules import LABEL, ScheduleAsked
from tests.unit.scheduler.driving import Driving


def offer_ask(drive: Driving, act: str, name: str = "nightly", tenant: str = "t", **arguments: Any) -> None:
    """Offer what a tenant asks; `add` is at three in the morning, of `true`, if nothing else is given."""
    if act == "add":
        arguments = {"cron": "0 3 * * *", "request": {"run": {"argv": ["true"]}}} | arguments
    asked = ScheduleAsked.of({"act": act, "name": name, **arguments})
    submit = None
    if asked.request is not None:
        body = encode({**asked.request, "labels": {LABEL: name}})
        submit = drive.engine.submitted(tenant, body, lambda: name)
    drive.engine.offer(ScheduleOrder(tenant, asked, submit, "schedule", shown=schedule_row))


def offer_run(
    drive: Driving, sequence: int, name: str = "nightly", tenant: str = "t", *, wish: int = 0, next_ms: int = 0
) -> None:
    """Offer a run as nats-server publishes it, for the wish that the ledger has if no other is given."""
    row = drive.state.schedule(tenant, name)
    wish = wish or (row.wish if row is not None else 1)
    latest_ms = latest_due_ms(row, drive.state.time_ms) if row is not None else 0
    drive.engine.offer(ScheduleRun(tenant, name, wish, sequence, next_ms, latest_ms, "run"))
