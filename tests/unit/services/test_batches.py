"""Which calls make up a batch, and when it begins; then what a function of batches does to each caller's answer."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from moorage.calls.batches import EARLY_S, Batches
from moorage.calls.function import Batch, BatchTasks, Taken, run, serve_async, serve_plain
from moorage.calls.served import Context, Served
from moorage.calls.wire import Frames, FromProgram, ToProgram, frame
from moorage.schemas.service import BatchSpec


def batches(most: int = 3, wait_ms: int = 5, places: int = 1) -> Batches:
    return Batches(BatchSpec(most, wait_ms), places)


def test_a_batch_begins_once_it_is_whole_or_the_first_calls_wait_is_over() -> None:
    made = batches()
    made.add(1, 0, 1000, 0.0)
    made.add(2, 0, 1000, 0.002)
    assert (made.next(0.004), made.due_s) == ([], 0.005 - EARLY_S), "a timer is late by as much"
    assert made.next(0.005 - EARLY_S) == [1, 2]
    for number in (1, 2):
        assert made.is_full
        made.end(number)
    assert not made.is_full
    for number in (3, 4, 5):
        assert not made.is_whole
        made.add(number, 0, 1000, 1.0)
    assert made.next(1.0) == [3, 4, 5]


def test_a_wait_for_a_place_is_a_wait_for_others_and_nobody_waits_longer_than_the_caller() -> None:
    made = batches()
    made.add(1, 4, 1000, 1.0)
    assert made.due_s == 1.0 + (0.001 - EARLY_S)
    made.add(2, 20, 1000, 1.0)
    assert made.due_s == 1.0
    assert made.next(1.0) == [1, 2]
    made = batches()
    made.add(3, 0, 2, 1.0)
    assert made.due_s == 1.0 + (0.002 - EARLY_S)


def test_a_call_leaves_before_its_batch_begins_and_a_place_is_free_once_all_of_a_batch_are_answered() -> None:
    made = batches(wait_ms=0)
    made.add(1, 0, 1000, 0.0)
    made.add(2, 0, 1000, 0.0)
    assert made.leave(1)
    assert made.next(0.0) == [2]
    assert not made.leave(2), "it runs"
    made.add(3, 0, 1000, 0.0)
    assert (made.next(9.0), made.due_s) == ([], None), "as many batches run as may"
    made.end(2)
    assert made.next(9.0) == [3]
    made.add(4, 0, 1000, 9.0)
    assert (made.forget_waiting(), made.due_s) == ([4], None)


@pytest.mark.parametrize("seed", range(20))
def test_each_call_is_in_one_batch_and_no_more_run_than_may(seed: int) -> None:
    dice = random.Random(seed)
    made = batches(dice.randint(1, 5), dice.randint(0, 5), dice.randint(1, 3))
    number, now_s, begun, left = 0, 0.0, list[int](), set[int]()
    running = dict[int, list[int]]()
    for _ in range(500):
        now_s += dice.random() / 500
        act = dice.random()
        if act < 0.6:
            number += 1
            made.add(number, dice.randint(0, 9), 1000, now_s)
        elif act < 0.7 and number and made.leave(dice.randint(1, number)):
            left.add(1)
        elif running:
            first = dice.choice(list(running))
            for each in running.pop(first):
                made.end(each)
        while batch := made.next(now_s):
            assert 1 <= len(batch) <= made.most
            running[batch[0]] = batch
            begun += batch
        assert len(running) <= made.places
        assert made.is_full is (len(running) == made.places)
        assert not made.is_whole
    assert len(set(begun)) == len(begun)


def answers(served: Any, calls: list[ToProgram], bodies: list[bytes], places: int = 1) -> dict[int, list[Any]]:
    """Run one batch, and return what its program says of each call: parts and answers as data, errors as `kind`."""
    told: dict[int, list[Any]] = {}
    member, program = socket.socketpair()
    with member, program:
        *others, last = calls
        for call, body in zip([*(each_more(one) for one in others), last], bodies, strict=True):
            member.sendall(frame(call, body))
        member.sendall(frame(ToProgram(end=True)))
        made = Served(served, "served", in_batches=True)
        if made.is_async:
            asyncio.run(serve_async(made, program, places))
        else:
            serve_plain(made, program, places)
        for head, body in Frames().feed(member.recv(1 << 16)):
            number = head.answer or head.part or head.error
            told.setdefault(number, []).append(said(head, body))
    assert told.pop(0) == [b""], "it is ready"
    return told


def each_more(call: ToProgram) -> ToProgram:
    return ToProgram(call.call, call.bytes, call.headers, more=True)


def said(head: FromProgram, body: bytes) -> Any:
    if head.error:
        return "bad-batch: " + head.message if head.bad_batch else f"{head.kind}: {head.message}"
    return "end" if head.in_parts else body


def batch(*bodies: bytes, **headers: str) -> tuple[list[ToProgram], list[bytes]]:
    return [ToProgram(n, len(body), headers) for n, body in enumerate(bodies, 1)], list(bodies)


@pytest.mark.parametrize("places", [1, 2])
def test_each_caller_has_its_own_answer_and_an_exception_in_the_list_is_one_callers(places: int) -> None:
    def answer(items: list[bytes]) -> list[Any]:
        return [ValueError("mine") if item == b"b" else {1, 2} if item == b"c" else item for item in items]

    async def later(items: list[bytes]) -> list[Any]:
        return answer(items)

    for function in (answer, later):
        told = answers(function, *batch(b"a", b"b", b"c", b"d"), places)
        assert (told[1], told[2], told[4]) == ([b"a"], ["ValueError: mine"], [b"d"])
        assert told[3] == [b"[1,2]"]


def test_data_that_cannot_be_read_leave_their_batch() -> None:
    calls, bodies = batch(b"[1]", b"[", **{"Content-Type": "application/json"})
    told = answers(lambda items: items, calls, bodies)
    assert told[1] == [b"[1]"]
    assert told[2][0].startswith("DecodeError: ")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([1], "return a list of 2: found a list of 1"), ([1, 2, 3], "return a list of 2: found a list of 3"),
        ({}, "return a list of 2: found a dict"), (None, "return a list of 2: found a NoneType"),
        (iter([[1, 2], [3]]), "yield a list of 2: found a list of 1"),
    ],
)  # fmt: skip
def test_no_list_of_as_many_answers_fails_each_caller_and_names_both_lengths(value: Any, found: str) -> None:
    told = answers(lambda items: value, *batch(b"a", b"b"))
    error = f"bad-batch: the function got 2 calls, and must {found}"
    assert [each[-1] for each in told.values()] == [error, error]


def test_an_error_that_is_raised_is_all_callers_of_the_batch_whose_answers_have_not_ended() -> None:
    def steps(items: list[bytes]) -> Iterator[list[Any]]:
        yield [b"1", StopIteration, KeyError("own")]
        yield [b"2", b"no more", b"no more"]
        raise OSError("disk")

    async def asteps(items: list[bytes]) -> AsyncIterator[list[Any]]:
        for each in ([b"1", StopIteration, KeyError("own")], [b"2", b"no more", b"no more"]):
            yield each
        raise OSError("disk")

    for function in (steps, asteps):
        told = answers(function, *batch(b"a", b"b", b"c"))
        assert told == {1: [b"1", b"2", "OSError: disk"], 2: ["end"], 3: ["KeyError: 'own'"]}


def test_a_generator_whose_answers_have_all_ended_is_closed() -> None:
    closed = []

    def endless(items: list[bytes]) -> Iterator[list[Any]]:
        try:
            while True:
                yield [StopIteration() for _ in items]
        finally:
            closed.append(len(items))

    assert answers(endless, *batch(b"a", b"b")) == {1: ["end"], 2: ["end"]}
    assert closed == [2]


def test_a_cancelled_call_leaves_its_batch_and_a_batch_whose_callers_are_all_gone_is_cancelled() -> None:
    async def scene() -> None:
        told, began = list[Any](), asyncio.Event()

        class Recorded:
            def write(self, data: bytes) -> None:
                told.extend(said(head, body) for head, body in Frames().feed(data))

            async def drain(self) -> None: ...

        async def forever(items: list[bytes], contexts: list[Context]) -> list[Any]:
            began.set()
            await asyncio.Event().wait()
            return []

        tasks = BatchTasks(Served(forever, "forever", in_batches=True), Recorded())
        calls, bodies = batch(b"a", b"b")
        tasks.begin([Taken(call, body, Context(call)) for call, body in zip(calls, bodies, strict=True)])
        await began.wait()
        [task] = tasks.tasks
        tasks.cancel(1)
        await asyncio.sleep(0)
        assert not task.done()
        tasks.cancel(2)
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert (told, tasks.tasks) == (["CancelledError: ", "CancelledError: "], set())

    asyncio.run(scene())
    got: list[Any] = []

    def note(items: list[bytes]) -> list[bytes]:
        got.extend(items)
        return items

    first, second = (Taken(call, body, Context(call)) for call, body in zip(*batch(b"a", b"b"), strict=True))
    first.context.cancel()
    run(
        Served(note, "served", in_batches=True),
        Batch([first, second], is_list=True),
        lambda _: None,
    )
    assert got == [b"b"], "it never hears of the call"
