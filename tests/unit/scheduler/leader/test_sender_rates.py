"""What a tenant or a worker may send: its bucket, who floods, and what the leader still reads of one that does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from moorage.bus.connection import Connection
from moorage.bus.errors import NoResponders
from moorage.bus.transport import Delivery, Handler
from moorage.scheduler.core.config import Config
from moorage.scheduler.leader.door import BEHIND_S, CALM, LOOK_S, RATION_EVERY_S, Door
from moorage.scheduler.leader.intake import WORKER_FRAMES_PER_S, Intake
from moorage.scheduler.leader.sender_rates import (
    BURST_S,
    FLOOD_MIN,
    FLOOD_S,
    RATION,
    REQUEST_BYTES,
    WAIT_S_MAX,
    SenderRates,
)
from moorage.schemas.subjects import Subjects
from moorage.testing.bus.bus import SimulatedBus, SimulatedClock, SimulatedConnection
from tests.unit.scheduler.driving import SUBJECTS, Driving

RATE = 100


def _sends(rates: SenderRates, tenant: str, count: int, *, size: int = 10, at_s: float = 0.0) -> list[float]:
    """Send messages; return for each how long its tenant is to wait, 0 for one that is taken."""
    return [rates.take(tenant, size, at_s) for _ in range(count)]


def test_a_tenant_sends_as_many_messages_as_its_rate_and_two_seconds_worth_at_once() -> None:
    rates = SenderRates(RATE)
    burst = int(RATE * BURST_S)
    assert not any(_sends(rates, "a", burst))
    assert _sends(rates, "a", 3) == pytest.approx([1 / RATE, 2 / RATE, 3 / RATE]), "each is told its own time"
    assert not any(_sends(rates, "b", burst)), "another tenant has a bucket of its own"
    assert not any(_sends(rates, "a", RATE, at_s=1.1)), "a second later it may send a second's worth"
    assert [row.tenant for row in rates.figures()] == ["a"]
    assert rates.figures()[0].refused == 3


def test_large_messages_use_the_bucket_of_bytes() -> None:
    rates = SenderRates(RATE)
    size = int(RATE * REQUEST_BYTES * BURST_S) // 2
    assert _sends(rates, "a", 2, size=size) == [0.0, 0.0]
    assert _sends(rates, "a", 1, size=size)[0] > 0
    few = SenderRates(10)
    assert _sends(few, "a", 2, size=64 * 1024, at_s=1.0)[0] == 0, "one message larger than the bucket is taken"
    [wait_s] = _sends(few, "a", 1, size=64 * 1024, at_s=1.0)
    assert 4 < wait_s <= WAIT_S_MAX
    assert _sends(few, "a", 1, size=64 * 1024, at_s=8.0) == [0.0]


def test_programs_that_send_again_too_early_get_what_the_rate_allows() -> None:
    rates = SenderRates(RATE)
    _sends(rates, "a", int(RATE * BURST_S))
    taken = sum(not wait for tenth in range(1, 51) for wait in _sends(rates, "a", 50, at_s=tenth / 10))
    assert taken == pytest.approx(5 * RATE, abs=2)


def test_a_clock_that_stands_or_a_message_that_was_held_back_makes_no_room() -> None:
    rates = SenderRates(RATE)
    _sends(rates, "a", int(RATE * BURST_S), at_s=100.0)
    assert all(_sends(rates, "a", 3, at_s=50.0))


def test_a_tenant_that_goes_on_for_a_second_though_it_is_refused_floods() -> None:
    rates = SenderRates(RATE)
    _sends(rates, "a", 100 * FLOOD_MIN)
    assert max(_sends(rates, "a", 1)) == pytest.approx(WAIT_S_MAX)
    assert rates.look(0.1, is_behind=False) == [], "a crowd that came at once may wait as it was told"
    assert rates.look(0.2, is_behind=False) == []
    found = []
    for at_s in (0.3, 0.4, 0.4 + FLOOD_S):  # a leader that is slow looks seldom
        _sends(rates, "a", 2 * FLOOD_MIN, at_s=at_s)
        _sends(rates, "b", FLOOD_MIN // 20, at_s=at_s)
        found.append(rates.look(at_s, is_behind=False))
    assert found == [[], [], ["a"]], "some of b are refused, too"
    rates.rationed = frozenset("a")
    _sends(rates, "a", FLOOD_MIN)
    assert rates.look(3.0, is_behind=False) == [], "it is known"


def test_of_a_leader_that_is_behind_those_flood_that_it_reads_most_of() -> None:
    rates = SenderRates(1_000_000)
    for at_s in (1.0, 2.0):
        _sends(rates, "loud", 2 * FLOOD_MIN, at_s=at_s)
        _sends(rates, "heavy", 2, size=FLOOD_MIN * REQUEST_BYTES, at_s=at_s)
        _sends(rates, "quiet", 10, at_s=at_s)
        assert rates.look(at_s, is_behind=at_s == 2.0) == ([] if at_s == 1.0 else ["loud", "heavy"])
    _sends(rates, "loud", FLOOD_MIN // 2, at_s=3.0)
    assert rates.look(3.0, is_behind=True) == [], "so much is no flood"
    assert rates.ration_of("loud") == pytest.approx(RATION, rel=0.05)
    assert rates.ration_of("heavy") == 1


def test_a_tenant_that_is_alone_never_floods_a_leader_that_is_behind() -> None:
    rates = SenderRates(1_000_000)
    _sends(rates, "quiet", 1, at_s=0.0)
    _sends(rates, "loud", 100 * FLOOD_MIN, at_s=100.0)
    assert rates.look(100.0, is_behind=True) == []


def test_workers_flood_by_what_is_beyond_their_rate_alone() -> None:
    """A busy fleet has few workers that report a lot, and a leader that is behind is not slow for a flood."""
    rates = SenderRates(RATE, by_part=False)
    _sends(rates, "quiet", 1)
    _sends(rates, "busy", int(RATE * BURST_S))
    assert not rates.some.is_set(), "nobody looks while all keep to their rate"
    assert rates.look(0.001, is_behind=True) == []
    for at_s in (0.1, 0.5, 0.1 + FLOOD_S):
        _sends(rates, "busy", 2 * FLOOD_MIN, at_s=at_s)
        assert rates.some.is_set()
        assert rates.look(at_s, is_behind=True) == (["busy"] if at_s > FLOOD_S else [])


def test_what_is_beyond_the_rate_is_refused_before_it_is_decoded() -> None:
    drive = Driving(config=Config(requests_per_s=10))
    answers: dict[str, bytes] = {}
    intake = Intake(drive.engine, SUBJECTS, answers.__setitem__, answers.__setitem__, _never, _never)
    body = b'{"gpu":{},"run":{"driver":"noop"}}'
    for number in range(25):
        intake.put(Delivery(SUBJECTS.api("t", "submit"), f"_INBOX.{number}", body, None, 7.0))
    intake.put(Delivery(SUBJECTS.api("t", "submit"), "_INBOX.torn", b"\xff not read", None, 7.0))
    intake.put(Delivery(SUBJECTS.api("t", "submit"), SUBJECTS.worker("w", "wanted"), body, None, 7.0))
    intake.put(Delivery(SUBJECTS.worker("w", "renew"), "_INBOX.w", b'{"kind":"renew","session":"s","n":1}', None, 7.0))
    refused = {reply: json.loads(answer) for reply, answer in answers.items()}
    assert set(refused) == {f"_INBOX.{number}" for number in range(20, 25)} | {"_INBOX.torn"}
    assert {answer["code"] for answer in refused.values()} == {"overloaded"}
    assert all(0 < answer["retry_after_s"] < 1 for answer in refused.values())
    intake.drain(drive.now)
    assert drive.engine.waiting == 21, "twenty requests, and the worker's frame"


@pytest.mark.parametrize("subject", [SUBJECTS.worker("loud", "renew"), SUBJECTS.load("loud")])
def test_a_worker_that_floods_is_dropped_before_it_is_decoded_and_no_other_one_is(subject: str) -> None:
    drive = Driving()
    intake = Intake(drive.engine, SUBJECTS, _never, _never, _never, _never)
    most = int(WORKER_FRAMES_PER_S * BURST_S)
    for _ in range(3 * most):
        intake.put(Delivery(subject, "", b"\xff not read", None, 7.0))
    assert intake.waiting == intake.frames_came == most
    intake.put(Delivery(SUBJECTS.worker("w", "renew"), "_INBOX.w", b"{}", None, 7.0))
    assert intake.waiting == most + 1
    large = Delivery(SUBJECTS.worker("large", "fact"), "", bytes(900_000), None, 7.0)
    for _ in range(1_000):
        intake.put(large)
    assert intake.waiting < 2 * most, "its bytes are bounded, too"
    assert intake.counters["over_rate"] == 3 * most + 1 + 1_000 - intake.waiting


def _never(*_: object) -> None:
    raise AssertionError(_)


# ----------------------------------------------------------------------------------------------------- subscriptions


class Slow:
    """A leader's connection whose round trips take as long as a test says."""

    def __init__(self, link: SimulatedConnection) -> None:
        self.link = link
        self.takes_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)

    async def flush(self, timeout_s: float = 5.0) -> None:
        await asyncio.sleep(self.takes_s)


Scene = Callable[[Door, SenderRates, Slow, SimulatedConnection, list[str]], Awaitable[None]]


def played(scene: Scene, known: tuple[str, ...] = ("quiet", "loud")) -> None:
    async def main() -> None:
        bus, heard = SimulatedBus(), list[str]()
        slow = Slow(bus.connect("leader"))
        rates = SenderRates(1_000_000)

        def on_request(delivery: Delivery) -> None:
            tenant = Subjects().token(delivery.subject, 1)
            heard.append(tenant)
            rates.take(tenant, len(delivery.data), asyncio.get_running_loop().time())

        def rows(tenant: str) -> list[tuple[str, Handler]]:
            return [(Subjects().api(tenant, "*"), on_request)]

        door = Door("tenant", cast(Connection, slow), Subjects(), rates, rows, lambda: known)
        await door.open()
        running = asyncio.ensure_future(door.run())
        await scene(door, rates, slow, bus.connect("tenants"), heard)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await door.close()

    SimulatedClock().run(main())


async def send(link: SimulatedConnection, tenant: str, count: int) -> None:
    await link.send([(Subjects().api(tenant, "ls"), b"{}", "")] * count)


async def flooded(rates: SenderRates, slow: Slow, link: SimulatedConnection) -> None:
    """Until `loud` is rationed: it sends far more than the other one, and the leader falls behind."""
    slow.takes_s = 4 * BEHIND_S
    while not rates.rationed:
        await send(link, "quiet", 1)
        await send(link, "loud", FLOOD_MIN)
        await asyncio.sleep(LOOK_S)
    slow.takes_s = 0.0


def test_a_flooding_tenant_gets_a_ration_and_others_all_that_they_send() -> None:
    async def scene(door: Door, rates: SenderRates, slow: Slow, link: SimulatedConnection, heard: list[str]) -> None:
        await flooded(rates, slow, link)
        assert rates.rationed == {"loud"}
        heard.clear()
        for _ in range(10):
            await send(link, "loud", 5 * RATION)
            await send(link, "quiet", 30)
            await asyncio.sleep(RATION_EVERY_S)
        assert heard.count("quiet") == 300
        assert 5 * RATION < heard.count("loud") <= 11 * RATION
        assert rates.figures()[0].rationed
        await send(link, "loud", 5 * RATION)
        with pytest.raises(NoResponders):
            await link.request(Subjects().api("loud", "ls"), b"{}", 5)

    played(scene)


def test_a_tenant_that_floods_no_more_is_served_as_before_and_so_is_a_new_one() -> None:
    async def scene(door: Door, rates: SenderRates, slow: Slow, link: SimulatedConnection, heard: list[str]) -> None:
        await flooded(rates, slow, link)
        await asyncio.sleep((CALM + 2) * RATION_EVERY_S)
        assert not rates.rationed
        heard.clear()
        await send(link, "loud", 2 * RATION)
        await send(link, "new", 3)
        await asyncio.sleep(1)
        assert [heard.count(name) for name in ("loud", "new")] == [2 * RATION, 3]

    played(scene)


def test_one_leader_that_is_slow_by_itself_rations_no_tenant() -> None:
    async def scene(door: Door, rates: SenderRates, slow: Slow, link: SimulatedConnection, heard: list[str]) -> None:
        slow.takes_s = 10 * BEHIND_S
        for _ in range(50):
            await send(link, "quiet", 10)
            await send(link, "loud", 20)
            await asyncio.sleep(0.1)
        assert not rates.rationed
        assert len(heard) == 50 * 30

    played(scene)
