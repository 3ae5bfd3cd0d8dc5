"""What one leader's term counts for monitors and screens: how long jobs waited, how they ended, what became of calls.

It begins at zero in each term, and nothing that is decided reads it.
"""

from __future__ import annotations

from moorage.scheduler.answers.call_totals import CallTotals
from moorage.scheduler.answers.idle_hosts import IdleHosts
from moorage.scheduler.answers.outcomes import Outcomes
from moorage.scheduler.answers.promises import Promises
from moorage.scheduler.answers.sizes import Sizes
from moorage.scheduler.answers.waited import Waited
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.schemas.answers.operators import WaitRow, Waits


class Counts:
    """The counts of the term of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waited = Waited()
        self.outcomes = Outcomes()
        self.calls = CallTotals(engine.state)
        self.idle = IdleHosts()
        self.sizes = Sizes(engine)
        self.promises = Promises(engine)
        self._begun = False

    def follow(self, outputs: Outputs) -> None:
        """Count what a record has begun, ended and woken, once it is acknowledged. What fails costs a count alone."""
        engine = self._engine
        try:
            self._count(outputs)
        except Exception as raised:
            engine.containment.note("output", f"counts of record {engine.state.seq}", "", raised, engine.state.time_ms)

    def _count(self, outputs: Outputs) -> None:
        engine = self._engine
        now_ms, shape_of = engine.state.time_ms, engine.reader.shape_of
        if outputs.started:
            self._waited.add([(job.tenant, shape_of(job), now_ms - job.may_start_ms) for job in outputs.started])
            for job in outputs.started:
                self.promises.started(job, now_ms)
        if outputs.ended:
            self.outcomes.add(outputs.ended, now_ms)
        if not self._begun:
            self._begun = True
            self.sizes.begin()
            self.promises.begin()
        self.sizes.add(outputs.ended)
        for tenant, service in outputs.woken:
            self.calls.woken(tenant, service, engine.built_ms)

    @property
    def waits(self) -> Waits:
        """How long jobs waited for their start, by class."""
        told = self._waited.as_data()
        return Waits(buckets_s=told["buckets_s"], rows=[WaitRow(**row) for row in told["rows"]])
