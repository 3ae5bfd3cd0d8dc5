"""What only a simulation can do: virtual time, faults, partitions and runs that repeat. What it shares with nats-server
is in the modules `test_conformance_*`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from moorage.bus.errors import ConnectionClosed, Disconnected, JetStreamRefused, NoResponders, RequestTimeout
from moorage.bus.jetstream import ERR_WRONG_LAST_SEQUENCE, EXPECTED_LAST_SEQUENCE, MESSAGE_ID, Ack, JetStream, JsError
from moorage.bus.transport import Delivery
from moorage.testing.bus.bus import SERVER, Faults, FaultyNetwork, SimulatedBus, SimulatedClock, Stalled
from tests.scenes import played_by
from tests.unit.bus.both_buses import answering


def simulate(scene: Callable[[SimulatedBus], Coroutine[Any, Any, Any]], **faults: Any) -> Any:
    bus = SimulatedBus(FaultyNetwork(**faults))
    return SimulatedClock().run(scene(bus))


def test_time_passes_only_when_nobody_has_anything_to_do() -> None:
    clock, slept = SimulatedClock(wall_start_s=1000), []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        slept.append((seconds, clock.now_s))

    async def scene() -> None:
        import time

        await asyncio.gather(sleeper(3600), sleeper(0.5), sleeper(60))
        assert time.monotonic() == clock.now_s == 3600
        assert time.time() == 4600
        assert time.clock_gettime(time.CLOCK_BOOTTIME) == 3600
        timer = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(5, timer.set_result, None)
        clock.advance(100)  # stopped for longer than the timer: it comes late
        await timer
        assert clock.now_s == 3700
        assert await asyncio.to_thread(lambda: 7) == 7

    clock.run(scene())
    assert slept == [(0.5, 0.5), (60, 60), (3600, 3600)]
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


@pytest.mark.slow
def test_a_simulation_that_cannot_go_on_says_so() -> None:
    async def waits_for_nothing() -> None:
        await asyncio.Event().wait()

    async def never_ends() -> None:
        loop = asyncio.get_running_loop()
        for second in itertools.count(1):
            timer = loop.create_future()
            loop.call_at(second, timer.set_result, None)
            await timer

    async def never_passes() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_later(1e-17, again)  # less than what a second's float can tell from none

        loop.call_later(1.0, again)
        await asyncio.sleep(2)

    with pytest.raises(Stalled, match=r"at 1\.000 s time stands still: .*again"):
        SimulatedClock().run(never_passes())
    with pytest.raises(Stalled, match="every task waits"):
        SimulatedClock().run(waits_for_nothing())
    with pytest.raises(Stalled, match="limit of 30"):
        SimulatedClock().run(never_ends(), limit_s=30)


def test_everything_says_simulated() -> None:
    bus = SimulatedBus()
    for each in (bus, bus.connect("a"), bus.network, SimulatedClock()):
        assert "simulated" in repr(each)
    assert bus.connect("b").server_version == "2.15.0-simulated"


async def chatter(bus: SimulatedBus, count: int = 300) -> list[tuple[int, float]]:
    """What b hears of a's numbered messages, a millisecond apart, and when."""
    a, b = bus.connect("a"), bus.connect("b")
    heard: list[tuple[int, float]] = []
    await b.subscribe("x", lambda d: heard.append((int(d.data), d.received_monotonic_s)))
    for n in range(count):
        await a.send([("x", b"%d" % n, "")])
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    return heard


def test_the_same_seed_is_the_same_run() -> None:
    faults = {"drop": 0.1, "duplicate": 0.1, "reorder": 0.1, "delay_ms": (1, 30)}
    runs = [simulate(chatter, seed=seed, **faults) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_drops_doubles_delays_and_reordering_are_each_their_own() -> None:
    numbers = list(range(300))
    assert [n for n, _ in simulate(chatter)] == numbers
    delayed = simulate(chatter, delay_ms=(5, 40))
    assert [n for n, _ in delayed] == numbers  # in order, whatever the delays
    assert all(0.005 <= at - n / 1000 < 0.3 for n, at in delayed)
    dropped = [n for n, _ in simulate(chatter, drop=0.2)]
    assert dropped == sorted(set(dropped))
    assert 180 < len(dropped) < 290
    doubled = [n for n, _ in simulate(chatter, duplicate=0.2)]
    assert sorted(set(doubled)) == numbers
    assert 310 < len(doubled) < 420
    reordered = [n for n, _ in simulate(chatter, reorder=0.2)]
    assert sorted(reordered) == numbers != reordered


@played_by(simulate)
async def test_faults_of_one_pair_are_not_those_of_another(bus: SimulatedBus) -> None:
    bus.network.between("a", "b", Faults(drop=1.0))
    a, b, c = bus.connect("a"), bus.connect("b"), bus.connect("c")
    heard: list[str] = []
    await b.subscribe("x", lambda _: heard.append("b"))
    await c.subscribe("x", lambda _: heard.append("c"))
    await a.send([("x", b"", "")])
    await asyncio.sleep(1)
    assert heard == ["c"]
    bus.network.heal()
    await a.send([("x", b"", "")])
    await asyncio.sleep(1)
    assert heard == ["c", "b", "c"]


def test_a_partition_cuts_both_ways_and_what_is_under_way() -> None:
    async def scene(bus: SimulatedBus) -> None:
        a, b, c = bus.connect("a"), bus.connect("b"), bus.connect("c")
        heard: list[bytes] = []
        await b.subscribe("x", lambda d: heard.append(d.data))
        await c.subscribe("ask", answering(c))
        await a.send([("x", b"under way", "")])
        bus.network.partition({"a", "c"}, {"b", SERVER})
        await a.send([("x", b"cut", "")])
        assert (await a.request("ask", b"same side", 1)).data == b"same side"
        with pytest.raises(RequestTimeout):
            await b.request("ask", b"", 1)
        with pytest.raises(RequestTimeout):
            await a.request("$JS.API.STREAM.INFO.S", b"", 1)
        bus.network.heal()
        await a.send([("x", b"healed", "")])
        await asyncio.sleep(1)
        assert heard == [b"healed"]

    simulate(scene, delay_ms=(1, 2))


@played_by(simulate)
async def test_a_lost_link_fails_what_is_awaited_and_comes_back_with_its_subscriptions(bus: SimulatedBus) -> None:
    states: list[str] = []
    a, b = bus.connect("a", on_state=lambda state: states.append(state.value)), bus.connect("b")
    heard: list[bytes] = []
    await a.subscribe("x", lambda d: heard.append(d.data))
    await b.subscribe("silent", lambda _: None)
    waiting = asyncio.ensure_future(a.request("silent", b"", 30))
    await asyncio.sleep(0)
    a.lose()
    with pytest.raises(Disconnected):
        await waiting
    assert await a.send([("y", b"", "")] * 3) == 0
    await b.send([("x", b"lost", "")])
    with pytest.raises(RequestTimeout):
        await a.request("silent", b"", 1)
    with pytest.raises(NoResponders):
        await b.request("x", b"", 1)
    await b.subscribe("echo", answering(b))
    later = asyncio.ensure_future(a.request("echo", b"back", 30))
    await asyncio.sleep(3)
    a.restore()
    assert (await later).data == b"back"
    await b.send([("x", b"heard", "")])
    await asyncio.sleep(0.1)
    assert heard == [b"heard"]
    assert states == ["reconnecting", "connected"]
    assert a.reconnects == 1


def test_a_subscription_that_is_drained_gets_what_is_on_its_way_from_all_senders() -> None:
    heard: list[bytes] = []

    async def scene(bus: SimulatedBus) -> None:
        senders = [bus.connect(str(at)) for at in range(20)]
        leaving = await bus.connect("leaving").subscribe("calls", lambda said: heard.append(said.data), "group")
        for each in senders:
            await each.send([("calls", b"before", "")])
        await leaving.drain()
        await senders[0].send([("calls", b"behind", "")])
        await asyncio.sleep(1)

    simulate(scene, delay_ms=(1, 100))
    assert heard == 20 * [b"before"]


@played_by(simulate)
async def test_close_ends_the_wait_for_a_connection(bus: SimulatedBus) -> None:
    a = bus.connect("a")
    a.lose()
    waiting = [asyncio.ensure_future(a.request("x", b"", 30)), asyncio.ensure_future(a.flush(30))]
    await asyncio.sleep(1)
    await a.close()
    for each in waiting:
        with pytest.raises(ConnectionClosed):
            await each
    assert asyncio.get_running_loop().time() < 2


@played_by(simulate)
async def test_a_defect_in_a_handler_is_told_and_stops_nothing(bus: SimulatedBus) -> None:
    errors: list[Exception] = []
    a = bus.connect("a", on_error=errors.append)
    heard: list[bytes] = []
    await a.subscribe("x", lambda d: heard.append(d.data[5:] if d.data[0] else b""))
    await a.send([("x", b"", ""), ("x", b"after", "")])
    await asyncio.sleep(0.1)
    assert len(heard) == 1
    assert ["IndexError" in str(error) for error in errors] == [True]


@played_by(simulate)
async def test_an_ambiguous_acknowledgement_is_stored_and_looks_like_silence(bus: SimulatedBus) -> None:
    a = bus.connect("a")
    js = JetStream(a)
    await js.ensure_stream({"name": "S", "allow_direct": True})
    bus.network.lose_next_ack("a")
    with pytest.raises(RequestTimeout):
        await js.append("S", b"1", {MESSAGE_ID: "m"})
    assert await js.append("S", b"1", {MESSAGE_ID: "m"}) == Ack("S", 1, duplicate=True)
    assert bus.network.counters["lost_acks"] == 1
    await asyncio.sleep(121)  # the window of two minutes is over
    assert await js.append("S", b"1", {MESSAGE_ID: "m"}) == Ack("S", 2)
    assert len(bus.streams()["S"].messages) == 2


@played_by(simulate)
async def test_accounts_do_not_see_each_other(bus: SimulatedBus) -> None:
    users, ledger = bus.connect("a"), bus.connect("a", account="ledger")
    await JetStream(ledger).ensure_stream({"name": "L"})
    heard: list[Delivery] = []
    await users.subscribe("x", heard.append)
    await ledger.send([("x", b"", "")])
    with pytest.raises(JetStreamRefused):
        await JetStream(users).stream_info("L")
    assert await JetStream(users).append("L", b"") == JsError(503, 0, "nobody answers on L")
    assert heard == []


@played_by(simulate)
async def test_what_is_not_simulated_is_refused(bus: SimulatedBus) -> None:
    a = bus.connect("a")
    for settings in ({"mirror": {"name": "T"}}, {"retention": "workqueue"}):
        with pytest.raises(JetStreamRefused, match="simulated") as refused:
            await JetStream(a).ensure_stream({"name": "S", **settings})
        assert refused.value.status == 501
    answer = json.loads((await a.request("$JS.API.CONSUMER.CREATE.S", b"{}", 1)).data)
    assert answer["error"]["code"] == 501


@played_by(simulate)
async def test_old_messages_leave_by_age(bus: SimulatedBus) -> None:
    js = JetStream(bus.connect("a"))
    await js.ensure_stream({"name": "S", "max_age": 10_000_000_000, "allow_direct": True})
    for _ in range(3):
        await js.append("S", b"")
        await asyncio.sleep(4)
    assert [m.seq for m in await js.direct_get_batch("S", seq=1)] == [2, 3]
    assert (await js.stream_info("S")).first_seq == 2


@pytest.mark.parametrize(
    ("replicas", "again"),
    [(1, JsError(400, ERR_WRONG_LAST_SEQUENCE, "wrong last sequence: 1")), (3, Ack("s", 1, duplicate=True))],
)
def test_a_fenced_message_that_is_sent_again_is_refused_or_a_duplicate_by_the_replicas(
    replicas: int, again: Ack | JsError
) -> None:
    """As nats-server does it: findings/jetstream-lone-replica-refuses-a-repeated-fenced-message-….sh."""

    async def scene(bus: SimulatedBus) -> None:
        js = JetStream(bus.connect("a"))
        await js.ensure_stream({"name": "s", "subjects": ["s"], "num_replicas": replicas})
        headers = {MESSAGE_ID: "m", EXPECTED_LAST_SEQUENCE: "0"}
        assert await js.append("s", b"", headers) == Ack("s", 1)
        assert await js.append("s", b"", headers) == again

    simulate(scene)
