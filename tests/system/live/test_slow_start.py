"""Leaders that need longer for their tables than a standby waits, as with many jobs or on a busy machine."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest

from moorage.bus.connection import connect
from moorage.scheduler.core.contained_engine import ContainedEngine
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.leader import term
from moorage.scheduler.leader.service import Scheduler
from moorage.schemas.subjects import Subjects
from tests.servers import Server
from tests.system.cli import forks
from tests.system.live.stack import QUICK, RealProcess, caller, stack

#: a scheduler whose engine takes half as long again as a standby waits
_SLOW: Final = f"""
import time
from moorage.scheduler import main
from moorage.scheduler.leader import term

class Slow(term.ContainedEngine):
    def __init__(self, *given):
        time.sleep({1.5 * QUICK["takeover_s"]})
        super().__init__(*given)

term.ContainedEngine = Slow
main.main()
"""


@pytest.mark.slow
async def test_schedulers_that_begin_slowly_do_not_take_over_from_each_other_for_ever(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        for name in ("one", "two", "three"):
            log = made.folder / f"{name}.log"
            arguments = ["-c", _SLOW, "--nats", made.url, "--prefix", unique, "--name", name]
            for key, value in QUICK.items():
                arguments += [f"--{key.replace('_', '-')}", f"{value:g}"]
            environment = os.environ | {"MOORAGE_LEDGER_URL": made.ledger_url}
            with log.open("ab") as out:
                made.processes.append(RealProcess(await forks.python(*arguments, env=environment, out=out), log))
        assert (await acme.submit("j", gpu={"model": "none"}))["kind"] == "accepted"


async def test_a_leader_whose_engine_took_long_is_not_fresh(
    nats_server: Server, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have taken over since its epoch record: it must not answer from memory."""
    late_ms = [0]
    now_ms = term.monotonic_ms

    class Slow(ContainedEngine):
        def __init__(self, *given: Any) -> None:
            late_ms[0] = 3_600_000
            super().__init__(*given)

    monkeypatch.setattr(term, "ContainedEngine", Slow)
    monkeypatch.setattr(term, "monotonic_ms", lambda: now_ms() + late_ms[0])
    async with await connect(nats_server.url, "world") as world, await connect(nats_server.ledger_url, "led") as ledger:
        begun = term.Term(Scheduler(world, ledger, subjects=Subjects(unique)), State(), now_ms())
        assert not begun.is_fresh()
