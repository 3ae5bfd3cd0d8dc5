"""Services that sleep while no calls come, and take turns on a GPU: what the leader does, in virtual time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moorage.scheduler.core.events import Wake
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.outputs.outputs import changes_since
from moorage.scheduler.questions.foresight import Foresight
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames.use import AttemptUse, DeviceUse
from moorage.schemas.service import MemberLoad
from tests.unit.scheduler.driving import PATIENCE_MS, Driving
from tests.unit.scheduler.queries.test_forecast_looks import nothing

CAN = {"process": Capabilities(answers_calls=True, freezes=True)}
CANNOT = {"process": Capabilities(answers_calls=True)}
ASKS = {"process": Capabilities(answers_calls=True, sleeps_engines=True)}
BY_REQUEST = {"sleep_by": {"sleep": {"path": "/sleep"}, "wake": {"path": "/wake_up"}}}


class Models:
    """Services on one host, each of one member, and what these say. Calls stay in a member until it runs."""

    def __init__(self, *names: str, gpus: int = 1, can: Any = CAN, **fields: Any) -> None:
        self.drive = Driving()
        self.worker = self.drive.worker("w0", gpus, capabilities=can)
        self.calls = dict[str, int]()  # that wait, by service
        self.ended = dict[str, int]()
        self.since_ms = dict[str, int]()  # since when the oldest of those waits
        self.waited_ms = dict[str, int]()
        self.tenants = dict[str, str]()
        self.silent = set[str]()  # services whose members say nothing, as those that load their model
        self.busy = set[str]()  # services in which a call runs all the time, too
        self.obey = set[str]()  # services whose members begin no call while they rest
        for name in names:
            self.submit(name, **fields)
            self.serve(1 if name == names[-1] else 12)

    def submit(self, name: str, tenant: str = "t", **fields: Any) -> dict[str, Any]:
        self.calls[name] = self.ended[name] = self.waited_ms[name] = 0
        self.tenants[name] = tenant
        service = {"name": name, "sleep_after_s": 10, "awake_s": 30, **fields.pop("service", {})}
        run = fields.pop("run", {"driver": "process", "argv": ["serve"], "grace_s": 5})
        return self.drive.submit(name, tenant=tenant, run=run, service=service, **{"gpu": {}, **fields})

    def state(self, name: str) -> str:
        return self.drive.states(name, self.tenants[name])[0]

    def states(self) -> list[str]:
        return [self.state(name) for name in self.calls]

    def say(self) -> None:
        """Each member says what it has; calls of one that runs end, eight at a time. All come to the first member."""
        for name, waiting in self.calls.items():
            if self.state(name) not in ("RUNNING", "FROZEN") or name in self.silent:
                continue
            since_ms = self.since_ms.setdefault(name, self.drive.now) if waiting else self.drive.now
            waits_ms = self.drive.now - since_ms
            if self.state(name) == "RUNNING" and not self.rests(f"{name}/0"):
                ended = min(waiting, 8)
                self.ended[name] += ended
                self.waited_ms[name] += ended * waits_ms
                self.calls[name] = waiting = waiting - ended
            if not waiting:
                self.since_ms.pop(name, None)
            self._say(name, 0, waiting, waits_ms)
            for index, state in enumerate(self.drive.states(name, self.tenants[name])):
                if index and state in ("RUNNING", "FROZEN"):
                    self._say(name, index, 0, 0)

    def _say(self, name: str, index: int, calls: int, waits_ms: int) -> None:
        tenant = self.tenants[name]
        member, is_first = self.drive.attempt(name, index, tenant), not index
        rests = self.rests(f"{name}/{index}")
        running = 0 if rests else min(calls + (is_first and name in self.busy), 8)
        waiting = calls if rests else max(0, calls - 8)
        load = MemberLoad(
            f"{name}/{index}", 8, running, waiting, waits_ms if waiting else 0, False, 0, 0, 0,
            self.ended[name] * is_first, self.waited_ms[name] * is_first, 0, name, index, member.fence, member.no,
            rests=rests,
        )  # fmt: skip
        self.drive.engine.offer_member_load(tenant, name, load, self.drive.now)

    def refuse(self, name: str) -> None:
        """The calls that wait for a service hear `busy`."""
        member, calls = self.drive.attempt(name, 0, self.tenants[name]), self.calls[name]
        self.calls[name] = 0
        for refused in (0, calls):
            load = MemberLoad(
                f"{name}/0", 8, 0, 0, 0, False, refused, 0, 0, self.ended[name], self.waited_ms[name], 0,
                name, 0, member.fence, member.no, rests=True,
            )  # fmt: skip
            self.drive.engine.offer_member_load("t", name, load, self.drive.now)

    def rests(self, member: str) -> bool:
        turn = self.drive.turns.get(member)
        return turn is not None and not turn.awake and member.partition("/")[0] in self.obey

    def serve(self, seconds: int) -> None:
        for _ in range(seconds):
            self.say()
            self.drive.pass_time(1000)
            self.drive.settle()

    def serve_called(self, seconds: int, *names: str) -> None:
        """As `serve`; a call comes each second to each of these."""
        for _ in range(seconds):
            for name in names:
                self.calls[name] += 1
            self.serve(1)

    def call(self, name: str) -> None:
        """A call comes: its member says so at once."""
        self.calls[name] += 1
        self.say()
        self.drive.settle()

    def whys(self, name: str) -> list[tuple[str, str]]:
        changes = changes_since(self.drive.state, self.drive.job(name, self.tenants[name]), 0)
        return [(change.state, change.why) for change in changes if change.state in ("FREEZE", "RESUME", "NOT_FROZEN")]


def test_a_member_without_calls_is_frozen_and_a_call_has_it_run_on_at_once() -> None:
    models = Models("embed")
    models.serve(9)
    assert models.states() == ["RUNNING"]
    models.call("embed")
    models.serve(9)
    assert models.states() == ["RUNNING"], "it counts from the last call"
    models.serve(4)
    assert models.states() == ["FROZEN"]
    models.serve(60)
    models.call("embed")
    assert models.states() == ["RUNNING"]
    assert [word for word, _ in models.whys("embed")] == ["FREEZE", "RESUME"]
    assert models.whys("embed")[0][1].startswith("no call for 1")
    models.serve(14)
    assert models.states() == ["FROZEN"]


def test_a_member_that_sleeps_on_a_leaving_worker_stays_until_another_one_serves() -> None:
    models = Models("embed")
    models.serve(12)
    models.worker.leaving_s = 600
    models.serve(2)
    assert models.states() == ["FROZEN"]
    models.call("embed")
    assert models.states() == ["RUNNING"], "no other one serves"
    models.serve(14)
    models.drive.worker("w1", 1, capabilities=CAN)
    models.serve(3)
    assert models.drive.placed_on("embed") == ["w1"]


def test_what_an_operator_freezes_no_call_resumes() -> None:
    models = Models("embed")
    models.drive.order("freeze", job="embed")
    models.drive.settle()
    models.call("embed")
    models.serve(3)
    assert models.states() == ["FROZEN"]


def test_a_member_that_ran_on_without_a_call_sleeps_again() -> None:
    models = Models("embed")
    models.serve(13)
    models.drive.order("resume", job="embed")
    models.drive.settle()
    models.serve(8)
    assert models.states() == ["RUNNING"], "it counts from when it ran on"
    models.serve(6)
    assert models.states() == ["FROZEN"]


def test_a_new_leader_has_a_called_member_run_on() -> None:
    models = Models("embed")
    models.serve(13)
    models.drive.lead()
    models.drive.renew()
    models.drive.settle()
    assert models.states() == ["FROZEN"]
    models.call("embed")
    assert models.states() == ["RUNNING"]


def test_a_member_that_cannot_be_frozen_is_asked_once_until_its_next_call() -> None:
    models = Models("embed")
    models.worker.freezes = False
    models.serve(60)
    assert [word for word, _ in models.whys("embed")] == ["FREEZE", "NOT_FROZEN"]
    models.call("embed")
    models.serve(12)
    assert [word for word, _ in models.whys("embed")] == ["FREEZE", "NOT_FROZEN"] * 2
    assert models.states() == ["RUNNING"]


def test_services_that_sleep_take_turns_and_each_stays_awake_for_its_time() -> None:
    models = Models("a", "b")
    assert models.states() == ["FROZEN", "RUNNING"], "the GPU of a service that sleeps takes another one"
    models.call("a")

    models.serve_called(20, "b")
    assert models.states() == ["FROZEN", "RUNNING"], "b is awake for less than its 30 s"
    assert "waits for its turn on its GPUs" in models.drive.explained("a")["why"]
    left_s = int(models.drive.explained("a")["why"].partition(", in about ")[2].removesuffix(" s"))
    assert 5 < left_s < 15
    models.serve_called(3, "b")
    assert f"in about {left_s - 3} s" in models.drive.explained("a")["why"]
    foresight = Foresight(models.drive.engine, lambda: models.drive.now, nothing, nothing, nothing, forks=False)
    models.drive.engine.explain_woken = foresight.at_wake
    models.drive.engine.offer(Wake("t", "a", "woken", json=True))
    models.drive.settle()
    assert f"in about {left_s - 3} s" in models.drive.answers["woken"]["data"]["why"]
    models.serve_called(12, "b")
    assert (models.states(), models.ended["a"]) == (["RUNNING", "FROZEN"], 1)
    assert models.whys("b")[-2:] == [
        ("FREEZE", "the service that sleeps on its GPUs is called"), ("RESUME", "it is called"),
    ]  # fmt: skip


def test_a_member_whose_turn_is_over_is_told_so_and_frozen_once_its_calls_have_ended_before_its_grace_is_over() -> None:
    models = Models("a", "b", run={"driver": "process", "argv": ["serve"], "grace_s": 20})
    models.busy.add("b")
    models.obey.add("b")
    models.serve(2)
    models.call("a")
    models.serve_called(26, "b")
    assert models.states() == ["FROZEN", "RUNNING"]
    assert "b/0" not in models.drive.turns, "it has its time"
    turn = models.drive.turns["a/0"]
    assert not turn.awake
    models.serve_called(3, "b")
    assert models.states() == ["RUNNING", "FROZEN"], "it waits for no grace"
    assert models.drive.turns["a/0"].awake
    assert models.calls["b"], "its other calls wait"
    models.busy.discard("b")
    models.serve(60)
    assert models.ended["b"] == 29, "all of them are answered in its next turn"


def test_a_member_whose_turn_is_over_goes_on_when_nobody_waits_for_its_gpus_any_more() -> None:
    models = Models("a", "b")
    models.busy.add("b")
    models.call("a")
    models.serve_called(30, "b")
    assert not models.drive.turns["b/0"].awake
    models.drive.order("hold", job="a")
    models.serve(1)
    assert models.drive.turns["b/0"].awake
    assert models.states()[1] == "RUNNING"


def test_a_turn_is_over_only_once_its_member_has_begun_calls_in_it_however_short_it_is() -> None:
    models = Models("a", "b", service={"awake_s": 0})
    models.obey |= {"a", "b"}
    models.serve_called(60, "a", "b")
    assert min(models.ended.values()) > 20, models.ended


def test_a_call_that_cannot_wait_for_its_turn_still_asks_for_it() -> None:
    models = Models("a", "b")
    member = models.drive.attempt("a")
    for refused in (0, 1):
        load = MemberLoad("a/0", 8, 0, 0, 0, False, refused, 0, 0, 0, 0, 0, "a", 0, member.fence, member.no, rests=True)
        models.drive.engine.offer_member_load("t", "a", load, models.drive.now)
    models.silent.add("a")
    models.serve(40)
    assert models.states()[0] == "RUNNING"


def test_services_that_sleep_by_a_request_take_turns_where_no_driver_freezes_and_others_do_not() -> None:
    models = Models("a", "b", can=ASKS, service=BY_REQUEST)
    assert models.states() == ["FROZEN", "RUNNING"], "the GPU of one that sleeps takes another one"
    models.call("a")
    models.serve_called(40, "b")
    assert (models.states(), models.ended["a"]) == (["RUNNING", "FROZEN"], 1)
    models.submit("c", on_no_match="wait")
    models.serve(2)
    assert models.drive.explained("c")["reason"] == "no-sleep"
    assert models.drive.order("freeze", job="a")["kind"] == "done", "an operator has it sleep, too"


def shares(gib: int) -> dict[str, Any]:
    return {"sharing": "time-slice", "share": {"memory_mib": gib * 1024}}


@pytest.mark.parametrize("can", [CAN, ASKS])
def test_services_that_share_a_gpu_by_memory_are_awake_beside_each_other_and_only_as_many_sleep_as_make_room(
    can: Any,
) -> None:
    models = Models(can=can)
    by = BY_REQUEST if can is ASKS else {}
    for name, gib in (("a", 30), ("b", 40), ("c", 30), ("d", 5)):  # the GPU has 79.6 GiB
        models.submit(name, gpu=shares(gib), service={"awake_s": 20, **by})
        models.serve(12)
    assert models.states() == ["FROZEN"] * 4
    models.serve_called(10, "a", "b", "d")
    assert models.states() == ["RUNNING", "RUNNING", "FROZEN", "RUNNING"], "75 GiB are awake"
    models.call("c")
    assert "waits for its turn on its GPUs" in models.drive.explained("c")["why"]
    models.serve_called(5, "a", "b", "d")
    assert models.states() == ["RUNNING", "RUNNING", "FROZEN", "RUNNING"], "each keeps its time"
    models.serve_called(15, "b", "c", "d")
    assert models.states() == ["FROZEN", "RUNNING", "RUNNING", "RUNNING"], "one of them is room enough"
    models.serve(40)
    models.call("a")
    models.call("b")
    assert models.states()[:2] == ["RUNNING", "RUNNING"], "nobody else needs it"
    assert "the service that sleeps on its GPUs is called" not in dict(models.whys("d")).values(), "it kept none asleep"


def test_what_lasts_beside_services_that_sleep_leaves_room_for_the_largest_of_them() -> None:
    models = Models()
    models.submit("big", gpu=shares(50))
    models.submit("small", gpu=shares(10))
    models.serve(20)
    models.serve_called(5, "small")
    assert models.states() == ["FROZEN", "RUNNING"]
    models.drive.submit("lasts-25", gpu=shares(25), run={"driver": "process", "argv": ["work"]})
    models.drive.submit("lasts-15", gpu=shares(15), run={"driver": "process", "argv": ["work"]})
    models.serve(2)
    assert models.drive.states("lasts-15") == ["RUNNING"]
    assert models.drive.states("lasts-25") == ["QUEUED"], "big would never wake beside it"
    models.call("big")
    assert models.states() == ["RUNNING", "RUNNING"]


def test_one_that_needs_all_of_a_gpu_takes_turns_with_those_that_share_it() -> None:
    models = Models()
    for name in ("a", "b"):
        models.submit(name, gpu=shares(20))
    models.serve(20)
    models.submit("alone")
    models.serve(2)
    assert models.states() == ["FROZEN", "FROZEN", "RUNNING"]
    models.call("a")
    models.call("b")
    models.serve_called(40, "alone")
    assert models.states() == ["RUNNING", "RUNNING", "FROZEN"]
    models.serve_called(40, "a", "b")
    assert models.states() == ["FROZEN", "FROZEN", "RUNNING"]
    assert not models.calls["alone"]


@pytest.mark.parametrize(("gib", "turns"), [(20, 1), (50, 2)])
def test_those_that_share_a_gpu_beside_each_other_take_one_turn_for_who_waits_behind_them(gib: int, turns: int) -> None:
    models = Models()
    for name in ("a", "b"):
        models.submit(name, gpu=shares(gib))
        models.serve(12)
    for name in ("x", "y"):
        models.submit(name)
        models.serve(12)
    models.call("x")
    models.serve(2)
    assert models.states() == ["FROZEN", "FROZEN", "RUNNING", "FROZEN"]
    for name in ("a", "b", "y"):
        models.call(name)
    models.serve(1)
    told_s = models.drive.turns["y/0"].in_ms / 1000
    waited_s = 0
    while models.state("y") != "RUNNING":
        models.serve_called(1, "a", "b", "x")
        waited_s += 1
    assert told_s / 30 == pytest.approx(1 + turns, abs=0.6), "x has its turn first, each for 30 s"
    assert abs(waited_s - told_s) <= 10 * (1 + turns)


@pytest.mark.parametrize("gpu", [{"sharing": "time-slice"}, {"sharing": "mps", "share": {"memory_mib": 1024}}])
def test_one_that_shares_without_an_amount_or_by_mps_does_not_sleep(gpu: dict[str, Any]) -> None:
    answer = Models().submit("a", gpu=gpu)
    assert "asks for memory of shared ones by time-slice" in str(answer), answer


def slow(models: Models, seconds: int) -> None:
    """Memory takes so long to be back on the GPU."""
    since: dict[int, int] = {}

    def has_swapped(held: Any, order: Any) -> bool:
        return order.on or models.drive.now - since.setdefault(order.n, models.drive.now) >= 1000 * seconds

    models.worker.has_swapped = has_swapped


def test_a_service_whose_wake_took_longer_than_it_may_stays_awake_and_a_quick_one_sleeps_again() -> None:
    for takes_s, state in ((8, "RUNNING"), (2, "FROZEN")):
        models = Models("a", service={"wake_within_s": 5})
        slow(models, takes_s)
        models.serve(13)
        assert models.states() == ["FROZEN"], "nothing is known of its wake"
        models.call("a")
        models.serve(40)
        assert models.states() == [state]
        why = models.drive.explained("a")["why"]
        if state == "RUNNING":
            assert why == "it stays awake: a wake takes about 9 s, and is to take at most 5 s"
        else:
            assert why.endswith("; 1 of 1 wake took at most 5 s")


@pytest.mark.parametrize(("cold_s", "within_s", "state"), [(4, 10, "QUEUED"), (20, 10, "FROZEN"), (4, 0, "FROZEN")])
def test_a_service_that_starts_soon_enough_ends_instead_of_sleeping(cold_s: int, within_s: int, state: str) -> None:
    models = Models(can={"process": Capabilities(answers_calls=True, freezes=True, reaches=True)})
    run = {"driver": "process", "argv": ["serve"], "grace_s": 5, "ready": {"call": True}}
    models.submit("a", run=run, replicas={"min": 0, "max": 2}, service={"wake_within_s": within_s})
    models.drive.engine.offer(Wake("t", "a", "reply", json=True))
    models.drive.settle()
    models.drive.pass_time(1000 * cold_s)
    models.drive.report("ready", "a")
    models.call("a")
    models.serve(150)
    assert models.states() == [state]


@pytest.mark.parametrize(
    ("freezes", "states", "words"),
    [(True, ["RUNNING", "FROZEN"], ["FREEZE", "RESUME"]), (False, ["FROZEN", "RUNNING"], ["FREEZE", "NOT_FROZEN"])],
)
def test_calls_undo_no_turn_before_its_worker_has_said_what_comes_of_it(
    freezes: bool, states: list[str], words: list[str]
) -> None:
    models = Models("a", "b")
    models.worker.hears_freezes = False
    models.busy.add("b")
    models.call("a")
    models.serve(60)
    assert [word for word, _ in models.whys("b")] == ["FREEZE"], "it is to be frozen, and no call changes that"
    models.worker.freezes, models.worker.hears_freezes = freezes, True
    models.serve(2)
    assert models.states() == states, "it hears that again with its renewals"
    assert [word for word, _ in models.whys("b")] == words


@pytest.mark.parametrize("silent", [False, True])
def test_a_guest_that_cannot_be_frozen_ends_for_the_service_that_was_there_first(silent: bool) -> None:
    models = Models("a", "b")
    models.worker.freezes = False
    (models.silent if silent else models.busy).add("b")
    models.drive.lead()
    models.drive.renew()
    models.call("a")
    models.serve(40)
    assert models.states() == ["FROZEN", "RUNNING"]
    models.serve(70)
    assert [word for word, _ in models.whys("b")] == ["FREEZE", "NOT_FROZEN"] * 2
    assert (models.states(), models.ended["a"]) == (["RUNNING", "QUEUED"], 1)
    changes = changes_since(models.drive.state, models.drive.job("b"), 0)
    assert any("could not be frozen" in change.why for change in changes)
    models.busy.clear()
    models.worker.freezes = True
    models.serve(60)
    assert models.states() == ["FROZEN", "QUEUED"], "it is no guest any more"
    models.submit("c")
    models.serve(2)
    assert models.states() == ["FROZEN", "QUEUED", "RUNNING"], "another service of its shape is"
    models.drive.worker("w1", capabilities=CAN)
    models.serve(2)
    assert models.states() == ["FROZEN", "RUNNING", "RUNNING"]


def test_a_guest_that_ran_on_before_its_worker_had_frozen_it_does_not_end_for_that() -> None:
    models = Models("a", "b")
    drive = models.drive
    models.busy |= {"a", "b"}
    drive.workers["w0"].hears_freezes = False
    for _ in range(3):
        models.call("a")
        while not drive.attempt("b").freeze:
            models.serve(1)
        drive.order("hold", job="a")
        models.serve(2)
        assert models.states() == ["FROZEN", "RUNNING"]
        assert models.whys("b")[-1] == ("RESUME", "it is called"), "nobody waits for its GPU now"
        drive.order("release", job="a")


def test_a_guest_that_ended_is_one_again_after_a_while() -> None:
    models = Models("a", "b")
    models.worker.stays_awake = {"b"}
    models.silent.add("b")
    models.call("a")
    models.serve(130)
    assert (models.states(), models.ended["a"]) == (["FROZEN", "QUEUED"], 1), "it took too long to load its model"
    models.serve(300)
    assert models.states() == ["FROZEN", "QUEUED"]
    models.worker.stays_awake.clear()
    models.silent.clear()
    models.serve(300)
    assert models.state("b") in ("RUNNING", "FROZEN")


def test_a_member_that_was_there_first_and_cannot_be_frozen_runs_on() -> None:
    models = Models("a", "b")
    models.call("a")
    models.serve(40)
    models.serve(14)
    models.call("b")
    models.serve(2)
    models.call("a")
    models.serve(35)
    models.call("b")
    models.worker.freezes = False
    models.busy.add("a")
    models.serve(200)
    assert models.states() == ["RUNNING", "FROZEN"]
    assert "could not be frozen" in models.drive.explained("b")["why"]


def uses(models: Models, **mib: int) -> None:
    """The worker says with its renewals how much memory these services have on their GPUs."""
    members = [(models.drive.attempt(name), used) for name, used in mib.items()]
    models.worker.use = [
        AttemptUse(each.fence, [DeviceUse(0, 0, used, None)], 0, "t", each.replica.job.name, 0, each.no)
        for each, used in members
    ]
    models.drive.renew()


def swap(models: Models, seconds: int) -> None:
    """What the worker is to freeze or to resume it has done after so many seconds."""
    models.worker.hears_freezes = False
    models.serve(seconds)
    models.worker.hears_freezes = True
    models.serve(2)


def test_explain_says_what_waking_takes_by_the_memory_of_a_service_and_then_as_measured() -> None:
    models = Models("embed")
    uses(models, embed=8192)
    models.serve(12)
    assert models.states() == ["FROZEN"]
    assert models.drive.explained("embed")["why"] == (
        "it is frozen until it is called; waking: 8 GiB from RAM, about 2 s"
    )
    models.worker.hears_freezes = False
    models.call("embed")
    assert models.drive.explained("embed")["why"] == "it is called, and is waking: 8 GiB from RAM, about 2 s"
    swap(models, 5)
    models.serve(12)
    assert models.drive.explained("embed")["why"].endswith("waking: 8 GiB from RAM, about 7 s")


def test_a_call_hears_of_the_awake_time_left_and_of_both_swaps() -> None:
    models = Models("a", "b")
    uses(models, b=19_000)
    models.call("a")
    models.serve_called(20, "b")
    turn = models.drive.turns["a/0"]
    assert not turn.awake
    left_ms = 1000 * int(models.drive.explained("a")["why"].partition(", in about ")[2].partition(" s")[0])
    assert turn.in_ms > left_ms, "b is to leave the GPU first"
    models.serve_called(20, "b")
    assert models.states() == ["RUNNING", "FROZEN"]
    models.serve(1)
    assert models.drive.turns["b/0"].why.endswith("; then waking: 18.6 GiB from RAM, about 4 s")


def foretold(models: Models, name: str, seconds: int) -> list[int]:
    """Return when a member is to have its GPUs, each time it is told so: in seconds since a fixed time."""
    told = []
    for _ in range(seconds):
        before = models.drive.turns.get(f"{name}/0")
        models.serve(1)
        turn = models.drive.turns[f"{name}/0"]
        if turn is not before and not turn.awake:
            told.append(round((models.drive.now + turn.in_ms) / 1000))
    return told


def test_a_member_that_is_waking_is_told_what_is_left_of_it() -> None:
    models = Models("embed")
    uses(models, embed=80_000)  # back within 14 s
    models.serve(12)
    assert models.states() == ["FROZEN"]
    models.worker.hears_freezes = False
    models.call("embed")
    ends = foretold(models, "embed", 12)
    assert len(ends) >= 3
    assert max(ends) - min(ends) <= 2, ends
    assert models.drive.explained("embed")["why"].endswith("78.1 GiB from RAM, about 3 s")
    models.serve(4)
    assert models.drive.explained("embed")["why"].endswith("is waking: 78.1 GiB from RAM"), "it is late"


def test_a_member_that_waits_for_another_one_to_leave_is_told_what_is_left_of_that() -> None:
    models = Models("a", "b")
    uses(models, b=40_000)  # gone within 21 s
    models.busy.add("b")
    models.call("a")
    models.serve(30)
    models.worker.hears_freezes = False
    models.serve(6)
    assert [word for word, _ in models.whys("b")] == ["FREEZE"]
    ends = foretold(models, "a", 18)
    assert len(ends) >= 4
    assert max(ends) - min(ends) <= 2, ends


def test_a_member_that_waits_for_the_turn_of_one_that_is_waking_is_told_all_of_that_turn() -> None:
    models = Models("a", "b", "c")
    for name in "ab":
        models.call(name)
    models.busy |= {"a", "b", "c"}
    models.worker.has_swapped = lambda held, order: order.on
    ends = foretold(models, "b", 31)
    while models.state("c") != "FROZEN":
        ends += foretold(models, "b", 1)
    assert models.drive.attempt("a").mask
    ends += foretold(models, "b", 9)
    assert models.states() == ["FROZEN"] * 3
    models.worker.has_swapped = lambda held, order: True
    ends += foretold(models, "b", 28)
    assert models.states() == ["RUNNING", "FROZEN", "FROZEN"]
    assert max(ends) - min(ends) <= 15, ends


NO_RAM = "no-ram: its 16384 MiB of GPU memory do not fit into the RAM of its host: 9000 MiB are available"


def test_a_member_for_which_its_host_has_no_ram_stays_awake_and_says_so() -> None:
    models = Models("embed")
    models.worker.freezes, models.worker.not_frozen = False, NO_RAM
    models.serve(12)
    assert models.states() == ["RUNNING"]
    assert models.whys("embed")[-1] == ("NOT_FROZEN", NO_RAM)
    assert models.drive.explained("embed")["why"] == f"it stays awake: {NO_RAM}"
    models.worker.freezes = True
    models.call("embed")
    models.serve(12)
    assert models.states() == ["FROZEN"], "it is asked again after its next call"


def test_each_member_that_cannot_be_frozen_has_its_own_reason() -> None:
    """The second member of a service had `no-ram`: calls that waited for the first one's GPU were refused at once."""
    models = Models()
    for number in range(2):
        models.drive.worker(f"v{number}", capabilities=CAN)
    models.worker.local = {0}
    models.drive.renew()
    models.submit("a", replicas=2)
    models.serve(1)
    at = {models.drive.attempt("a", index).worker.id: index for index in range(2)}
    workers = [models.drive.workers[f"v{number}"] for number in range(2)]
    for worker, why in zip(workers, ("CUDA error 801", NO_RAM), strict=True):
        worker.freezes, worker.not_frozen = False, why
    models.serve(12)
    words = changes_since(models.drive.state, models.drive.job("a"), 0)
    told = {change.replica: change.why for change in words if change.state == "NOT_FROZEN"}
    assert told == {at["v0"]: "CUDA error 801", at["v1"]: NO_RAM}
    sleeping = models.drive.engine.sleeping
    whys = {m.worker.id: sleeping.stays_awake(m) for m in models.drive.job("a").attempts}
    assert whys == {"v0": "CUDA error 801", "v1": NO_RAM}


def test_calls_that_wait_for_one_for_which_there_is_no_ram_hear_that_at_once() -> None:
    models = Models("a", "b")
    models.call("a")
    models.serve(40)
    models.serve(14)
    models.call("b")
    models.serve(2)
    models.call("a")
    models.serve(35)
    assert models.states() == ["RUNNING", "FROZEN"]
    models.worker.freezes, models.worker.not_frozen = False, NO_RAM
    models.busy.add("a")
    models.call("b")
    models.serve(40)
    assert models.states() == ["RUNNING", "FROZEN"], "a was there first"
    turn = models.drive.turns["b/0"]
    assert turn.stuck
    assert 0 < turn.in_ms <= 35_000
    assert "no-ram: its host's RAM has no room for it" in turn.why, "the sizes may be another tenant's"
    assert "no-ram" in models.drive.explained("b")["why"]
    models.worker.freezes = True
    models.serve(40)
    assert models.ended["b"] > 1
    assert not models.drive.turns["b/0"].stuck


@pytest.mark.parametrize("calls_wait", [True, False])
def test_a_guest_for_which_there_is_no_ram_ends_for_the_service_that_was_there_first(calls_wait: bool) -> None:
    models = Models("a", "b")
    models.worker.freezes, models.worker.not_frozen = False, NO_RAM
    models.busy.add("b")
    if not calls_wait:
        models.obey.add("a")
    models.call("a")
    models.serve(40)
    assert models.states() == ["FROZEN", "RUNNING"]
    turn = models.drive.turns["a/0"]
    assert turn.stuck, "its calls hear so at once"
    assert "no-ram" in turn.why
    if not calls_wait:
        models.refuse("a")
    models.serve(70)
    assert [word for word, _ in models.whys("b")] == ["FREEZE", "NOT_FROZEN"] * 2
    assert models.states() == ["RUNNING", "QUEUED"]
    assert models.ended["a"] == calls_wait
    models.busy.clear()
    models.worker.freezes = True
    models.serve(60)
    assert models.states() == ["FROZEN", "QUEUED"], "for ten minutes it is no guest any more"
    models.drive.worker("w1", capabilities=CAN)
    models.serve(2)
    assert models.states() == ["FROZEN", "RUNNING"], "elsewhere it starts again at once"


def test_a_guest_that_loads_its_model_takes_turns_like_one_that_is_called() -> None:
    models = Models("a")
    models.serve(12)
    models.silent.add("b")
    models.submit("b")
    models.serve(10)
    models.call("a")
    models.busy.add("a")
    models.serve(40)
    assert (models.states(), models.ended["a"]) == (["RUNNING", "FROZEN"], 1)
    models.serve(40)
    assert models.states() == ["FROZEN", "RUNNING"], "it goes on loading in its turn"


@pytest.mark.parametrize("of_a", [{"priority": 40}, {"tenant": "u"}])
def test_neither_priority_nor_share_keeps_a_service_from_its_turn(of_a: dict[str, Any]) -> None:
    models = Models()
    models.submit("a", **of_a)
    models.busy.add("a")
    models.serve(600)  # its tenant has used more
    models.busy.clear()
    models.serve(12)
    for name in "bc":
        models.submit(name)
        models.serve(12)
    models.busy |= {"a", "b", "c"}
    for _ in range(2):
        before = dict(models.ended)
        models.serve_called(160, "a", "b", "c")
        assert all(models.ended[name] > before[name] for name in "abc"), (before, models.ended)


def test_tenants_that_take_turns_on_another_host_keep_no_service_asleep() -> None:
    models = Models("embed", priority=40)
    models.serve(14)
    assert models.states() == ["FROZEN"]
    models.drive.worker("w1", 8)
    models.calls["embed"] += 1
    models.say()
    for tenant in "uv":
        models.drive.offer_submit(tenant, tenant=tenant, gpu={}, priority=50)
    models.drive.tick()
    assert models.drive.placed_on("u", "u") == models.drive.placed_on("v", "v") == ["w1"]
    assert models.drive.slots("embed") == [0], "it has its GPU with the same record"


def test_services_of_one_gpu_do_not_starve_one_of_two() -> None:
    models = Models(gpus=2)
    models.submit("a", gpu={"count": 2})
    models.serve(12)
    models.busy |= {"b", "c"}
    for name in "bc":
        models.submit(name)
        models.serve_called(7, "b")
    for _ in range(3):
        before = dict(models.ended)
        models.serve_called(160, "a", "b", "c")
        assert all(models.ended[name] > before[name] for name in "abc"), (before, models.ended)


def two_gpus_and_guest() -> Models:
    """A service of two GPUs that sleeps, and one of one GPU that runs on one of these."""
    models = Models(gpus=2)
    models.submit("a", gpu={"count": 2})
    models.serve(12)
    models.submit("b")
    models.busy.add("b")
    models.serve(1)
    assert models.states() == ["FROZEN", "RUNNING"]
    return models


def test_a_service_sleeps_for_none_whose_other_gpu_is_in_other_use() -> None:
    models = two_gpus_and_guest()
    other = 1 - models.drive.slots("b")[0]
    models.worker.local = {other}
    models.drive.renew()
    models.call("a")
    models.serve_called(100, "b")
    assert (models.states(), models.whys("b")) == (["FROZEN", "RUNNING"], []), "its end would give a nothing"
    assert "waits until its worker gives its GPUs" in models.drive.explained("a")["why"]
    models.busy.discard("b")
    models.serve(12)
    models.call("b")
    assert models.states() == ["FROZEN", "RUNNING"], "nor does it wait behind that one"
    models.busy.add("b")
    models.worker.local = set()
    models.drive.renew()
    models.serve_called(40, "b")
    assert models.ended["a"] == 1


def test_a_service_runs_on_before_one_that_waits_for_a_member_that_cannot_be_frozen() -> None:
    models = Models("f", gpus=2)
    models.serve(12)
    models.submit("a", gpu={"count": 2})
    models.serve(13)
    models.call("f")
    models.busy |= {"f", "b"}
    models.submit("b")
    models.serve(1)
    assert models.states() == ["RUNNING", "FROZEN", "RUNNING"]
    models.worker.stays_awake = {"f"}
    models.call("a")
    models.serve_called(150, "b", "f")
    ended = models.ended["b"]
    models.serve_called(150, "b", "f")
    assert models.ended["b"] - ended > 100
    models.worker.stays_awake = set()
    models.serve_called(120, "b", "f")
    assert models.ended["a"] == 1, "once that one can be frozen, it has its turn"
    ended = models.ended["b"]
    models.serve_called(60, "b", "f")
    assert models.ended["b"] > ended


@pytest.mark.parametrize(
    ("verb", "of", "why"),
    [
        ("hold", {"job": "a"}, "is to run on, and is held"),
        ("hold", {"tenant": "t"}, "is to run on, and is held"),
        ("limit", {"tenant": "t", "gpus": 1}, "tenant t has 1 of 1 GPUs leased"),
    ],
)
def test_a_service_is_not_frozen_for_one_that_may_not_have_its_gpu(verb: str, of: dict[str, Any], why: str) -> None:
    models = Models("a")
    models.serve(12)
    models.submit("b", tenant="u")
    models.drive.worker("w1")
    models.drive.submit("train", gpu={}, run={"driver": "process", "argv": ["train"]})
    models.serve(1)
    assert (models.states(), models.drive.states("train")) == (["FROZEN", "RUNNING"], ["RUNNING"])
    models.busy |= {"a", "b"}
    models.drive.order(verb, **of)
    models.call("a")
    models.serve(60)
    assert (models.states(), models.whys("b")) == (["FROZEN", "RUNNING"], [])
    assert why in models.drive.explained("a")["why"]


def test_a_service_is_not_frozen_for_one_behind_a_job_that_waits_for_the_limit_of_its_tenant() -> None:
    models = Models("a")
    models.serve(12)
    models.submit("b", tenant="u")
    models.drive.worker("w1")
    models.drive.submit("train", gpu={}, run={"driver": "process", "argv": ["train"], "timeout_s": 3600})
    models.serve(1)
    assert (models.states(), models.drive.states("train")) == (["FROZEN", "RUNNING"], ["RUNNING"])
    models.drive.order("limit", tenant="t", gpus=2)
    models.drive.worker("w2", gpus=2)
    models.drive.submit("wide", gpu={"count": 2}, priority=90, run={"driver": "process", "argv": ["train"]})
    models.busy |= {"a", "b"}
    models.call("a")
    models.serve_called(200, "b")
    assert (models.states(), models.whys("b")) == (["FROZEN", "RUNNING"], [])
    assert models.drive.states("wide") == ["QUEUED"]
    assert "behind a job of tenant t that waits for the tenant's limit" in models.drive.explained("a")["why"]
    models.drive.cancel("wide")
    models.serve_called(40, "b")
    assert models.ended["a"] == 1


def test_a_tenant_at_its_limit_takes_turns_among_its_own_services() -> None:
    models = Models("a", "b")
    models.drive.order("limit", tenant="t", gpus=1)
    models.call("a")
    models.serve(35)
    assert (models.states(), models.ended["a"]) == (["RUNNING", "FROZEN"], 1)


@pytest.mark.parametrize("gpus", [1, 2])
def test_replicas_of_one_service_take_no_turns_with_each_other(gpus: int) -> None:
    models = Models("a", gpus=gpus, replicas=gpus + 1)
    models.serve(30)
    assert models.drive.states("a") == ["FROZEN"] * gpus + ["QUEUED"]
    assert models.drive.explained("a")["reason"] == "frozen-here"
    models.submit("b")
    models.serve(2)
    assert models.states() == ["FROZEN", "RUNNING"], "one of another service does, also behind them in the queue"
    models.drive.worker("w1", capabilities=CAN)
    models.serve(2)
    assert models.drive.states("a") == ["FROZEN"] * gpus + ["RUNNING"]


def test_a_replica_that_its_own_frozen_one_keeps_out_keeps_no_other_service_out_beside_gpus_too_few_for_it() -> None:
    models = Models(gpus=4)
    models.drive.submit("train", gpu={}, run={"driver": "process", "argv": ["train"]})
    models.submit("a", gpu={"count": 2}, replicas=2)
    models.serve(30)
    assert models.drive.states("a") == ["FROZEN", "QUEUED"]
    assert models.drive.explained("a")["reason"] == "frozen-here", "one GPU is free, and it needs two"
    models.submit("b", gpu={"count": 2})
    models.serve(2)
    assert models.states() == ["FROZEN", "RUNNING"]
    assert models.drive.states("a") == ["FROZEN", "QUEUED"]


def test_a_replica_ends_a_preemptible_job_beside_a_frozen_one_of_its_service() -> None:
    models = Models(gpus=2)
    models.drive.order("limit", tenant="t", gpus=1)
    models.submit("a", replicas=2)
    run = {"driver": "process", "argv": ["train"]}
    models.drive.submit("train", tenant="u", gpu={}, preemptible=True, run=run)
    models.serve(1)
    assert (models.drive.states("a"), models.drive.states("train", "u")) == (["RUNNING", "QUEUED"], ["RUNNING"])
    models.serve(15)
    assert models.drive.states("a") == ["FROZEN", "RUNNING"], "the first one has given back what its tenant may have"


@pytest.mark.parametrize("timeout_s", [3_600, None])
@pytest.mark.parametrize("trains", [1, 2])
def test_gpus_beside_a_frozen_member_and_not_its_own_are_reserved_for_a_replica_of_its_service(
    trains: int, timeout_s: int | None
) -> None:
    models = Models(gpus=4)
    for number in range(trains):
        run = {"driver": "process", "argv": ["train"], "timeout_s": timeout_s}
        models.drive.submit(f"train{number}", gpu={}, run=run)
    models.submit("a", gpu={"count": 2}, replicas=2)
    models.serve(PATIENCE_MS // 1000 + 15)
    assert models.drive.states("a") == ["FROZEN", "QUEUED"]
    held = models.drive.engine.planner.verdicts.reservation
    assert (held is not None) == (timeout_s is not None), "nothing says when they end"
    if held is not None:
        assert held.start_ms > models.drive.state.time_ms + 3_000_000


def test_a_replica_too_many_is_looked_up_on_the_hosts_of_its_own_frozen_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = Models("a", gpu={"model": "H100"}, replicas=2)
    for number in range(4):
        models.drive.worker(f"x{number}", model="NVIDIA A100-SXM4-80GB", capabilities=CAN)
        models.submit(f"b{number}", tenant="u", gpu={"model": "A100"})
    models.serve(30)
    assert (models.drive.states("a"), set(models.states())) == (["FROZEN", "QUEUED"], {"FROZEN"})
    looks = list[str]()
    closed_turns = Fleet.closed_turns

    def look(fleet: Fleet, host: Host, num: int) -> int:
        looks.append(host.worker.id)
        return closed_turns(fleet, host, num)

    monkeypatch.setattr(Fleet, "closed_turns", look)
    models.serve(10)
    assert set(looks) == {"w0"}


def test_a_job_of_another_kind_gets_no_gpu_of_a_service_that_sleeps() -> None:
    models = Models("a")
    models.serve(13)
    models.drive.submit("train", gpu={}, run={"driver": "process", "argv": ["train"]})
    models.drive.settle()
    assert (models.states(), models.drive.states("train")) == (["FROZEN"], ["QUEUED"])
    assert models.drive.explained("train")["reason"] == "frozen-here"


def test_the_gpu_of_a_job_that_an_operator_froze_takes_no_service_that_sleeps() -> None:
    models = Models()
    models.drive.submit("train", gpu={}, run={"driver": "process", "argv": ["train"]})
    models.drive.settle()
    models.drive.order("freeze", job="train")
    models.drive.settle()
    models.submit("a")
    models.drive.settle()
    assert models.states() == ["QUEUED"]


@pytest.mark.parametrize("seed", range(2))
def test_no_gpu_has_two_awake_members_no_call_is_lost_and_each_has_its_turn(seed: int) -> None:
    """Five services on two GPUs, called at random; then all of them all the time."""
    random_ = random.Random(seed)
    names = ["a", "b", "c", "d", "e"]
    models = Models(gpus=2)
    for name in names:
        models.submit(name)
        models.serve(12)
    asked = 0
    for _ in range(25):
        asked += 1
        models.call(random_.choice(names))
        models.serve(random_.randrange(12))
        held = [member for member in models.drive.state.attempts() if member.mask]
        assert len({(member.worker.num, member.mask) for member in held}) == len(held) <= 2
    for _ in range(2):
        before = dict(models.ended)
        for _ in range(130):
            asked += len(names)
            models.calls = {name: waiting + 1 for name, waiting in models.calls.items()}
            models.serve(1)
        assert all(models.ended[name] > before[name] for name in names), (before, models.ended)
    models.serve(130)
    assert sum(models.ended.values()) == asked


def test_a_fleet_that_freezes_nothing_has_no_service_that_sleeps() -> None:
    models = Models(can=CANNOT)
    refused = models.submit("a", on_no_match="reject")
    assert "no worker that offers the driver process can freeze its jobs" in refused["message"]
    models.submit("b")
    assert models.drive.explained("b")["reason"] == "no-sleep"


@pytest.mark.parametrize(
    ("can", "by", "freezes", "state"),
    [
        (CAN, {}, True, "FROZEN"),
        (CANNOT, {}, False, "QUEUED"),
        (CAN, {}, False, "QUEUED"),
        (ASKS, BY_REQUEST, True, "FROZEN"),
        (ASKS, {}, True, "QUEUED"),
    ],
)
def test_the_last_member_of_a_service_that_may_have_none_sleeps_where_it_can_and_else_ends(
    can: Any, by: dict[str, Any], freezes: bool, state: str
) -> None:
    models = Models(can=can)
    models.worker.freezes = freezes
    models.submit("a", replicas={"min": 0, "max": 2}, service={"sleep_after_s": 300} | by)
    models.drive.engine.offer(Wake("t", "a", "reply", json=True))
    models.drive.settle()
    models.serve(100)
    models.call("a")
    models.serve(295)
    assert models.states() == ["RUNNING"]
    models.serve(15)
    assert models.states() == [state]
    assert models.drive.job("a").rows[0].attempt_no == 1


def test_calls_that_waited_for_a_turn_make_a_service_no_larger() -> None:
    models = Models("a", replicas={"min": 1, "max": 4})
    models.submit("b", service={"awake_s": 60})
    models.serve(12)
    assert models.states() == ["FROZEN", "RUNNING"]
    models.calls["a"] = 24
    models.serve(40)
    assert (models.state("a"), models.ended["a"]) == ("FROZEN", 0)
    assert "; its frozen member: it is called, and waits for its turn" in models.drive.explained("a")["because"]
    models.serve(60)
    assert models.ended["a"] == 24
    assert models.drive.job("a").scaled is None


def test_a_new_leader_ends_the_last_member_once_it_has_heard_no_call_for_as_long() -> None:
    models = Models(can=CANNOT)
    models.submit("a", replicas={"min": 0, "max": 2}, service={"sleep_after_s": 40})
    models.drive.engine.offer(Wake("t", "a", "reply", json=True))
    models.drive.settle()
    models.serve(30)
    models.drive.lead()
    models.drive.renew()
    models.drive.settle()
    models.serve(35)
    assert models.states() == ["RUNNING"]
    models.serve(15)
    assert models.states() == ["QUEUED"]
