"""What a member counts of its calls, and how its load frame and `STATS` say it."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from moorage.calls.discovery import Discovery
from moorage.calls.member import Member
from moorage.calls.meter import Meter
from moorage.schemas.codec import encode
from moorage.schemas.release import RELEASE
from moorage.schemas.service import BATCH_SIZES, CALL_CODES_MAX, CALL_MS, OTHER_CODES, CallCounts, MemberLoad
from tests.unit.services.test_member import Recorded, call, member


def test_a_member_counts_its_calls_by_time_and_its_errors_by_code() -> None:
    m, _ = member(places=1, room=1)
    m.on_call(call("a"), 0.0)
    m.on_call(call("b"), 0.0)
    m.on_call(call("refused", hops=2), 0.0)
    m.on_end(1, 0.005)
    m.on_end(2, 70.0)
    m.meter.failed(503, "all members that were asked are full")
    load = m.load(70.0)
    assert (load.ended, load.refused, load.waited_ms, load.ran_ms) == (2, 1, 5, 70_000)
    assert load.counts.waited == (1, 1, *[0] * (len(CALL_MS) - 1)), "a bound counts what is equal to it"
    assert load.counts.ran == (0, 1, *[0] * (len(CALL_MS) - 2), 1), "and one class is for what is above all"
    assert load.counts.errors == {"503": 1}
    assert msgspec.json.decode(encode(load), type=MemberLoad) == load
    m = Member("m", Recorded(), 1, attempt=("acme", "embedder", 2, 3, 7))
    m.meter.failed(503, "all members that were asked are full")
    stats = msgspec.json.decode(Discovery(m, "embed", "t", "moorage.call.t.embed").answer("$SRV.STATS", 70.0))
    (endpoint,) = stats["endpoints"]
    assert (endpoint["num_errors"], endpoint["last_error"]) == (1, "503:all members that were asked are full")
    told = {name: endpoint["data"][name] for name in ("job", "replica", "attempt", "fence")}
    assert told == {"job": "embedder", "replica": 2, "attempt": 3, "fence": 7}


def test_a_member_says_of_which_version_it_is_and_since_when_it_serves() -> None:
    m = Member("m", Recorded(), 1, attempt=("acme", "embedder", 2, 3, 7))

    def told(version: str, verb: str = "INFO") -> tuple[str, dict[str, str]]:
        asked = Discovery(m, "embed", "acme", "moorage.call.acme.embed", version=version).answer(f"$SRV.{verb}", 0.0)
        frame = msgspec.json.decode(asked)
        return frame["version"], frame["metadata"]

    version, metadata = told("3f2a,2.1.0-rc.1")
    assert (version, metadata["request"], metadata["version"]) == ("2.1.0-rc.1", "3f2a", "2.1.0-rc.1")
    assert datetime.fromisoformat(metadata["started"]).tzinfo == UTC
    assert told("3f2a,blue", "PING") == (RELEASE, {**told("", "PING")[1], "request": "3f2a", "version": "blue"})


def test_batches_are_counted_by_their_calls_and_codes_are_bounded() -> None:
    meter = Meter()
    for size in (1, 3, 4, 1000):
        meter.batch(size)
    for code in range(400, 400 + 2 * CALL_CODES_MAX):
        meter.failed(code, "")
    meter.failed(400, "")
    counts = meter.counts()
    assert counts.batches == (1, 0, 2, *[0] * (len(BATCH_SIZES) - 3), 1)
    assert counts.batched == 1008
    assert counts.errors["400"] == 2
    assert counts.errors[OTHER_CODES] == CALL_CODES_MAX
    assert len(counts.errors) == CALL_CODES_MAX + 1


def test_the_load_of_a_member_that_counts_nothing_in_classes_is_read() -> None:
    before = b'{"member":"m","places":1,"running":0,"waiting":0,"oldest_ms":0,"draining":false,"refused":0,"expired":0,'
    load = msgspec.json.decode(before + b'"handed":0,"ended":0,"waited_ms":0,"ran_ms":0}', type=MemberLoad)
    assert load.counts == CallCounts()
