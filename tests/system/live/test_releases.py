"""A ledger of each release that is kept, and of this one, is folded, and led on by a scheduler."""

from __future__ import annotations

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import Ack, JetStream
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger import state_bytes as snapshot
from moorage.scheduler.ledger.invariants import validate
from tests.release.frames.record import PREFIX, RELEASES, Recorded, recorded
from tests.servers import Server
from tests.system.live.stack import TRY_S, Stack, caller, stack


def folded(it: Recorded, state: State) -> State:
    """The state after the last record, from an empty one or from the snapshot's."""
    for seq, _, data in it.ledger:
        if seq > state.seq:
            fold(state, decode_record(data), seq)
    validate(state)
    return state


async def put(it: Recorded, made: Stack) -> None:
    """Append the recorded ledger to an empty stream, as the release would have."""
    async with await connect(made.ledger_url, "old ledger") as connection:
        js = JetStream(connection)
        settings = {"storage": "file", "retention": "limits", "discard": "new", "max_age": 0, "num_replicas": 1}
        subjects = {"name": made.subjects.ledger_stream, "subjects": [made.subjects.ledger_all]}
        await js.ensure_stream({**subjects, **settings, "deny_delete": True, "allow_direct": True})
        for seq, subject, data in it.ledger:
            answer = await js.append(subject.replace(PREFIX, made.subjects.prefix, 1), data)
            assert answer == Ack(made.subjects.ledger_stream, seq)


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
async def test_a_ledger_of_a_release_before_is_led_on(nats_server: Server, unique: str, release: str) -> None:
    it = recorded(release)
    state = folded(it, State())
    assert (state.digest, state.workers["w1"].hello["release"]) == (it.digest, it.release)
    seq, data = it.snapshot
    middle = snapshot.load(data)  # which checks the digest that the release wrote
    assert middle.seq == seq
    assert any(not job.over for job in middle.jobs.values()), "the snapshot was taken under a running job"
    assert folded(it, middle).digest == it.digest

    async with stack(nats_server, unique) as made, caller(made) as acme:
        await put(it, made)
        # else it forgets, a moment later, jobs that ended a day and more before the record was made
        await made.set_scheduler("", {"finished_keep": 366 * 86400.0}, made.url, made.ledger_url)
        assert (await acme.leader(2))["epoch"] == 2
        for job, ended in it.states.items():
            assert await acme.state(job) == ended
        submits = list(it.submits())
        assert len(submits) >= 10
        for payload, then in submits:
            answer = (await acme.nc.request(made.subjects.api("acme", "submit"), payload, timeout=TRY_S)).data
            now = (msgspec.json if answer.startswith(b"{") else msgspec.msgpack).decode(answer)
            assert (now["kind"], now.get("duplicate", False)) == (then["kind"], then["kind"] == "accepted")
            assert now.get("ledger") == then.get("ledger")
