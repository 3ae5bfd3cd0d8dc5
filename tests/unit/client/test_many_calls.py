"""Calls that wait on disk, as a replica makes them: which are made again, and what its items come to."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from moorage.client import CallFailed, CallRefused, Rejected, many_calls
from moorage.client.call_answers import Outcome, encode_outcome, read_outcomes, shares_of
from moorage.client.errors import client_problem, rejected, timed_out
from moorage.client.many_calls import _shares, call_each
from moorage.client.services import AsyncService


class Service:
    """Answers each item by what stands for it: errors in turn, and then the item itself."""

    def __init__(self, **errors: list[Exception]) -> None:
        self.calls = Counter[Any]()
        self._errors = errors

    async def call(self, item: Any, **_: Any) -> Any:
        self.calls[item] += 1
        if left := self._errors.get(item):
            raise left.pop(0) if len(left) > 1 else left[0]
        return item


def _failed(code: str, kind: str = "") -> CallFailed:
    return CallFailed(client_problem(code, f"{kind}: why" if kind else "why"), kind=kind)


def _refused(code: str) -> CallRefused:
    return CallRefused(client_problem(code, "why"))


async def _outcomes(service: Service, items: list[Any]) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    calling = cast("AsyncService", service)
    failed = await call_each(calling, items, 5, lambda each: found.update({each.item: each}), at_once=2, within_s=1.0)
    assert failed == sum(each.error is not None for each in found.values())
    return {number: found[number] for number in sorted(found)}


async def test_what_nobody_took_is_called_again_without_end_and_what_was_cut_off_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(many_calls, "AGAIN_S", 0.0)
    busy = [_refused(code) for code in ("service-busy", "no-member", "call-expired", "no-service") * 10]

    class Later(Service):
        async def call(self, item: Any, **how: Any) -> Any:
            if item == "busy" and busy:
                self.calls[item] += 1
                raise busy.pop()
            return await super().call(item, **how)

    service = Later(
        died=[_failed("member-died")], slow=[timed_out("slow")], wrong=[_failed("call-failed", "ValueError")],
        large=[rejected("too-large", "too large")],
    )  # fmt: skip
    found = await _outcomes(service, ["busy", "died", "slow", "wrong", "large", "ok"])
    assert service.calls == {"busy": 41, "died": 3, "slow": 3, "wrong": 1, "large": 1, "ok": 1}
    assert {number: each.error and each.error.kind for number, each in found.items()} == {
        5: None, 6: "member-died", 7: "timed-out", 8: "ValueError", 9: "too-large", 10: None,
    }  # fmt: skip
    assert found[8].error is not None
    assert found[8].error.message == "why"


async def test_a_service_that_no_job_has_for_long_fails_the_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_calls, "AGAIN_S", 0.0)
    monkeypatch.setattr(many_calls, "NO_SERVICE_S", 0.0)
    [outcome] = (await _outcomes(Service(x=[_refused("no-service")]), ["x"])).values()
    assert outcome.error is not None
    assert outcome.error.kind == "no-service"


async def test_a_line_that_was_cut_off_is_no_answer_and_bytes_are_bytes_again() -> None:
    [outcome] = (await _outcomes(Service(), [b"\x00\xff"])).values()
    whole = encode_outcome(outcome)
    found = read_outcomes(whole + b"\n" + encode_outcome(Outcome(6, "x"))[:-2])
    assert {number: each.answer for number, each in found.items()} == {5: b"\x00\xff"}


def test_each_item_is_in_one_replica_of_which_there_are_few() -> None:
    for count, replicas in (
        (1, 1),
        (16, 16),
        (17, 9),
        (16_001, 17),
        (1_000_000, 1000),
    ):
        shares = _shares(count, None)
        assert len(shares) == replicas
        run = {"items": shares}
        assert sum(len(items) for _, items in shares_of(run, ((0, replicas - 1),))) == count
    assert _shares(5, 2) == ["0-1", "2-3", "4"]
    with pytest.raises(Rejected, match="more than 1000 replicas"):
        _shares(3000, 2)
