"""Requests with every field that there is, through the whole core: drawn as the net of options draws them.

Each is accepted, or refused by an error. What is accepted is placed on a host that has what it asks for, or says why it
waits. Every answer about it can be made, the ledger folds twice to the same state, and it ends as it is cancelled.
`Driving` checks each record.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec

from moorage.schemas.errors import Problem
from moorage.schemas.job import STATE_TABLE
from moorage.testing.requests import drawn, some_of
from tests.unit.scheduler.driving import Driving

ENDED: Final = {row.name for row in STATE_TABLE if row.terminal}
JOBS: Final = 12
#: fields that name what another site has: its jobs, and a record of its ledger
OF_A_SITE: Final = {"after", "if_seq", "again_of", "instead_of"}


def play(seed: int) -> dict[str, int]:
    """Play one world; return how many of its requests were accepted, refused and placed."""
    rng, drive = random.Random(seed), Driving.with_hosts(8, 4, 1)
    counts = {"accepted": 0, "refused": 0, "placed": 0}
    names = list[str]()
    for number in range(JOBS):
        body = {**some_of(drawn(seed * JOBS + number), rng, OF_A_SITE).body, "job": f"j{number}", "on_no_match": "wait"}
        reply = drive.offer_submit(f"j{number}", body=msgspec.json.encode(body))
        drive.tick()
        answer = drive.answers[reply]
        if isinstance(answer, Problem) or answer.get("kind") == "error":
            counts["refused"] += 1
            continue
        counts["accepted"] += 1
        names.append(f"j{number}")
        drive.settle(4)
        told = drive.explained(f"j{number}")
        counts["placed"] += told["state"] not in ("QUEUED", *ENDED)
        assert told["state"] != "QUEUED" or told["reason"], (seed, number, told)
    drive.lead()
    drive.renew()
    for name in names:
        drive.cancel(name)
        drive.settle(4)
    for _ in range(4):
        drive.pass_time(30_000, step=10_000)
        drive.settle()
    for name in names:
        found = drive.explained(name)["state"]
        assert found in ENDED, (seed, name, found)
    return counts
