"""The interval checker that all judges share: what is planted is found, and what only touches is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.testing.demo.drawn_jobs import Planned
from moorage.testing.demo.intervals import ALONE, Holders, Span, clash, overlaps
from moorage.testing.demo.judge import judge

MOST = {"mps": 3, "time-slice": 2}


def found(*spans: Span[str, str]) -> list[tuple[str, list[str]]]:
    return [(late.holder, sorted(beside)) for late, beside in overlaps(spans, MOST)]


def test_one_alone_and_so_many_of_a_mode() -> None:
    assert found(Span("g", "a", 0, 5), Span("g", "b", 4, 6)) == [("b", ["a"])]
    assert found(Span("g", "a", 0, 5), Span("h", "b", 4, 6)) == []
    assert found(Span("g", "a", 0, 5, "mps"), Span("g", "b", 4, 6, "time-slice")) == [("b", ["a"])]
    assert found(Span("g", "a", 0, 5, "mps"), Span("g", "b", 4, 6)) == [("b", ["a"])]
    three = [Span("g", name, 0, 9, "mps") for name in "abc"]
    assert found(*three) == []
    assert found(*three, Span("g", "d", 5, 6, "mps")) == [("d", ["a", "b", "c"])]
    assert found(Span("g", "a", 0, 9, "any"), *(Span("g", str(n), 1, 2, "any") for n in range(50))) == []


def test_what_touches_is_no_overlap_and_a_moment_within_is_one() -> None:
    assert found(Span("g", "a", 0, 5), Span("g", "b", 5, 6)) == []
    assert found(Span("g", "a", 0, 5), Span("g", "b", 3, 3)) == [("b", ["a"])]
    assert found(Span("g", "a", 5, 5), Span("g", "b", 5, 6)) == [("b", ["a"])]
    assert found(Span("g", "a", 0, 5), Span("g", "b", 5, 5)) == []


def test_of_an_end_that_nobody_saw_only_the_beginning_is_sure() -> None:
    assert found(Span("g", "a", 0, None), Span("g", "b", 3, 6)) == []
    assert found(Span("g", "a", 0, 5), Span("g", "b", 3, None)) == [("b", ["a"])]


def test_who_ends_before_it_began_is_a_mistake_of_the_record() -> None:
    with pytest.raises(ValueError, match="before it began"):
        found(Span("g", "a", 5, 4))


def test_taking_and_leaving_as_it_happens() -> None:
    now: Holders[str, str] = Holders(MOST)
    assert now.take("g", "a") == []
    assert now.take("g", "a") == [], "said twice"
    assert now.take("g", "b") == ["a"]
    now.leave("g", "a")
    now.leave("g", "never")
    assert now.take("g", "c") == ["b"]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("gh"), st.integers(0, 8), st.integers(0, 6), st.sampled_from([ALONE, "mps", "time-slice"])
        ),
        max_size=7,
    )
)
def test_it_finds_what_comparing_all_pairs_finds(rows: list[tuple[str, int, int, str]]) -> None:
    spans = [Span(thing, str(n), began, began + long, mode) for n, (thing, began, long, mode) in enumerate(rows)]
    pairs = set()
    for late, beside in overlaps(spans):
        pairs |= {frozenset((late.holder, other)) for other in beside}
    expected = {
        frozenset((a.holder, b.holder))
        for a in spans
        for b in spans
        if a is not b and a.thing == b.thing and clash(a.mode, b.mode) and _meet(a, b)
    }
    assert pairs == expected


def _meet(a: Span[str, str], b: Span[str, str]) -> bool:
    """Whether some moment is in both; one of no length is its own moment."""
    assert a.ended is not None
    assert b.ended is not None
    if a.began == b.began:
        return True
    early, late = (a, b) if a.began < b.began else (b, a)
    assert early.ended is not None
    return early.ended > late.began


# ---------------------------------------------------------------------------------------------- the judge of the demo

PLANS = [
    Planned("a", {}, "SUCCEEDED"),
    Planned("b", {}, "SUCCEEDED"),
    Planned("s", {"gpu": {"sharing": "time-slice"}}, "SUCCEEDED", runs=5),
    Planned("c", {}, "CANCELLED"),
]
CLEAN = [
    "start a 0 1 7 100 u0",
    "end a 0 1 7 200",
    "start b 0 1 8 200 u0",
    "end b 0 1 8 300",
    *(f"start s {n} 1 9 {400 + n} u1" for n in range(4)),
    *(f"end s {n} 1 9 {500 + n}" for n in range(4)),
    "start c 0 1 10 600 u0,u1",
]
STATES = {"a": "SUCCEEDED", "b": "SUCCEEDED", "s": "SUCCEEDED", "c": "CANCELLED"}


def verdict(*more: str, states: dict[str, str] = STATES) -> tuple[bool, tuple[int, int, int]]:
    told = judge(PLANS, states, {}, dict.fromkeys(STATES, 0), "\n".join([*CLEAN, *more]))
    return told.kept, (told.lost, told.started_twice, told.double_leases)


def test_a_clean_demo_is_kept_and_what_is_planted_is_not() -> None:
    assert verdict() == (True, (0, 0, 0))
    assert verdict(states=STATES | {"a": "RUNNING"}) == (False, (1, 0, 0))
    assert verdict("start a 0 2 11 700 -", "end a 0 2 11 701") == (False, (0, 1, 0))
    assert verdict("start s 4 1 9 450 u1", "end s 4 1 9 460") == (False, (0, 0, 1)), "one sharer too many"
    assert verdict("bad a saw u9") == (False, (0, 0, 0))
    moved = "\n".join(CLEAN).replace("start b 0 1 8 200", "start b 0 1 8 199")
    told = judge(PLANS, STATES, {}, dict.fromkeys(STATES, 0), moved)
    assert (told.kept, told.double_leases) == (False, 1)
