"""The command `moorage admin resize`: how a part is spelled, and what it prints."""

from __future__ import annotations

import pytest

from moorage.cli.fleet.admin import _part_of, _resized
from moorage.client.errors import Rejected
from moorage.schemas.operate import Done, Resized


@pytest.mark.parametrize(
    ("compute", "memory", "part"),
    [("40%", None, (40, None)), (None, "8192M", (None, 8192)), ("40%", "8G", (40, 7629)), (None, None, (None, None))],
)
def test_a_part_is_spelled_as_in_a_gpu_token(
    compute: str | None, memory: str | None, part: tuple[int | None, int | None]
) -> None:
    if (compute, memory) == (None, None):
        with pytest.raises(Rejected, match="in percent"):
            _part_of(compute, memory)
    else:
        assert _part_of(compute, memory) == part


@pytest.mark.parametrize(
    ("compute", "memory"), [("40", None), ("8G", None), (None, "40%"), ("0%", None), ("101%", "8G")]
)
def test_what_is_no_part_is_refused_with_the_way_to_ask(compute: str | None, memory: str | None) -> None:
    with pytest.raises(Rejected) as refused:
        _part_of(compute, memory)
    assert refused.value.problem.next == "moorage admin resize --help"


def test_the_answer_says_how_each_attempt_takes_its_part() -> None:
    done = Done("resize", True, state="RUNNING", resized=Resized(8192, 40, 1, {"live": 2, "counted": 1}))
    assert _resized(done) == (
        "40 % of compute, 8192 MiB of memory of each GPU, the job is RUNNING"
        "; for 1 running attempt it takes effect in the scheduler's count only: no limiter enforces the share on the "
        "running processes; for 2 running attempts it takes effect at once: the limiter enforces the new share"
    )
