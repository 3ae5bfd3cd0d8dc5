"""Calls of the driver while an attempt is frozen: they wait in the limiter, and the worker sees that they do."""

from __future__ import annotations

import select
import subprocess
import time

import pytest

from moorage.worker.sharing.limiter.segment import Segment
from tests.nvidia.limited import Limited
from tests.system.worker.sharing.test_limiter import GIB, one

__all__ = ["one"]

ROUTES = ("link", "dlsym", "proc", "proc-ptsz")
pytestmark = pytest.mark.xdist_group("limiter")  # what it needs is compiled once


#: calls of every kind, as app.c knows them, and what each says
CALLS = {
    "launch=1": "1 launched", "alloc=4096": "0", "info": f"{GIB} of {GIB}", "copy=8": "0", "synchronize=0": "0",
    "synchronize=1": "0", "synchronize=2": "0", "graph=1": "0", "launchex=1": "0",
}  # fmt: skip


@pytest.mark.parametrize("word", CALLS)
def test_fact_60_a_call_of_a_frozen_attempt_waits_until_it_is_resumed(one: Limited, word: str) -> None:
    """And the worker sees that it waits."""
    one.segment.beat()
    argv = [str(one.built / "app"), "link"]
    with subprocess.Popen(argv, env=one.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdin is not None
        assert app.stdout is not None

        def ask(what: str) -> None:
            app.stdin.write(f"{what}\n")  # type: ignore[union-attr]
            app.stdin.flush()  # type: ignore[union-attr]

        ask("total=0")
        assert app.stdout.readline() == f"{GIB}\n"
        one.segment.hold_calls()
        assert not one.segment.is_wanted()
        ask(word)
        give_up_s = time.monotonic() + 60
        while not one.segment.is_wanted():
            one.segment.beat()
            assert time.monotonic() < give_up_s
        for _ in range(20):  # it waits for as long as the worker gives signs
            one.segment.beat()
            assert not select.select([app.stdout], [], [], 0.005)[0], "it went on"
        one.segment.let_calls_pass()
        assert app.stdout.readline() == f"{CALLS[word]}\n"
        assert not one.segment.is_wanted()
        app.kill()


@pytest.mark.parametrize("route", ROUTES)
def test_calls_that_only_wait_are_handed_on_as_they_are(one: Limited, route: str) -> None:
    six = 1_000_000 + 200_000 + 30 + 4_000 + 500 + 6
    eight = 1 + 20 + 300 + 4_000 + 50_000 + 12 + 140 + 1_600
    assert one.said("wide", "copy=8", route=route) == [f"{six} {eight}", "0"]
    one.segment.beat(1)
    one.segment.hold_calls()
    assert one.said("copy=8", "wide", route=route)[1] == f"{six} {eight}"
    assert one.segment.is_wanted(), "each route has the hooks"


def test_without_a_heartbeat_the_calls_of_a_frozen_attempt_go_to_the_driver(one: Limited) -> None:
    one.segment.beat(1)
    one.segment.hold_calls()
    assert one.said("alloc=4096", "launch=1") == ["0", "1 launched"]
    assert one.segment.is_wanted(), "the next worker sees it"


def test_another_process_of_the_worker_knows_that_a_call_waits(one: Limited) -> None:
    one.segment.beat(1)
    one.said("launch=1")
    one.segment.hold_calls()
    again = Segment.adopt(one.segment.path)
    assert not again.is_wanted()
    one.said("launch=1")
    assert again.is_wanted()
    again.hold_calls()
    assert again.is_wanted(), "what came while no agent looked is not forgotten"
    again.let_calls_pass()
    again.hold_calls()
    assert not again.is_wanted(), "what came before it was stopped counts no longer"
    again.close()
