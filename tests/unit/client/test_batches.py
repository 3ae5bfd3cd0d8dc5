"""Requests of one submit in frames: as few as the bounds of a frame allow, each within both."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from moorage.client import AsyncClient, Rejected
from moorage.client.batches import BATCH_MAX, frames_of, in_order
from moorage.client.request_builder import build_request
from moorage.schemas.codec import FRAME_BYTES_MAX
from moorage.schemas.job import Request
from moorage.testing import SimFleet
from tests.scenes import in_virtual_time


def test_a_frame_has_at_most_so_many_requests() -> None:
    bodies = [b"%d" % number for number in range(2 * BATCH_MAX + 1)]
    frames = [msgspec.json.decode(frame) for frame in frames_of(bodies)]
    assert [len(frame) for frame in frames] == [BATCH_MAX, BATCH_MAX, 1]
    assert [number for frame in frames for number in frame] == list(range(len(bodies)))


def test_a_frame_has_at_most_so_many_bytes() -> None:
    body = b'"' + b"x" * 60_000 + b'"'
    frames = frames_of([body] * 40)
    assert all(len(frame) <= FRAME_BYTES_MAX for frame in frames)
    assert [len(msgspec.json.decode(frame)) for frame in frames] == [15, 15, 10]


def test_of_no_request_there_is_no_frame() -> None:
    assert frames_of([]) == []


def chain(*named: str) -> list[Request]:
    """Requests as `c<b,a`: c starts after b and after a."""
    parts = [each.partition("<") for each in named]
    return [
        build_request(["true"], job=job, fields={"after": after.split(",")} if after else {}) for job, _, after in parts
    ]


def test_a_request_may_stand_before_one_that_it_waits_for() -> None:
    requests = chain("c<b,a", "a", "other", "b<a", "late<gone")
    order, circle = in_order(requests)
    places = {str(requests[at].job): place for place, at in enumerate(order)}
    assert (sorted(order), circle) == ([0, 1, 2, 3, 4], [])
    assert places["a"] < places["b"] < places["c"]
    assert in_order(chain("a", "b", "c<elsewhere")) == ([0, 1, 2], [])


def test_jobs_that_wait_for_each_other_are_named() -> None:
    order, circle = in_order(chain("x", "a<c", "b<a", "c<b"))
    assert order == []
    assert circle[0] == circle[-1]
    assert sorted(circle[1:]) == ["a", "b", "c"]
    waits = {"a": "c", "b": "a", "c": "b"}
    assert all(waits[one] == other for one, other in pairwise(circle)), circle


@in_virtual_time
async def test_a_batch_is_taken_whatever_its_order_and_a_circle_is_refused_whole() -> None:
    async with AsyncClient(transport=SimFleet("2xH100")) as moorage:
        jobs = await moorage.submit_many(chain("c<b", "b<a", "a"))
        assert [job.job for job in jobs] == ["c", "b", "a"]
        assert (await jobs[0].result()).state == "SUCCEEDED"
        with pytest.raises(Rejected, match=r"jobs wait for each other: (u after v after u|v after u after v)"):
            await moorage.submit_many([*chain("u<v", "v<u"), ["true"]])
        assert {row.job for row in (await moorage.ls()).jobs} == {"a", "b", "c"}
