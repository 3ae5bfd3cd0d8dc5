"""A service stays up while its members move, and while a next version takes its place, in virtual time.

Workers are honest: they start what is placed and end what they are asked to end, at once. A member is ready `WARM_MS`
after its start, if its version can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from moorage.scheduler.answers import views
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import ChangeOrder
from moorage.scheduler.core.ledger.state import RUNNING
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Goodbye, Unwell
from moorage.schemas.operate import ChangeAsked
from moorage.schemas.service import MemberLoad
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.honest_worker import HeldAttempt, Worker

WARM_MS: Final = 2_000
#: for how long it is watched: longer than all that has to happen
WATCHED_S: Final = 60
L40S: Final = "NVIDIA L40S"
READY: Final[dict[str, Any]] = {"driver": "process", "argv": ["serve"], "ready": {"call": True}, "restart": "always"}
CALLS: Final = {"process": {"answers_calls": True, "reaches": True, "execs": True}}
PREEMPTS: Final = Config(preempt_priority=80, preempt_after=60.0)
#: what an attempt of a version does: after how many ms it ends, and how
DOES: Final = {
    "fails at its start": (0, "exit"),
    "fails its check": (4_000, "not-ready"),
    "ends soon": (5_000, "exit"),  # ready for 3 s
    "ends later": (10_000, "exit"),
}


class Site(Driving):
    """Workers, and a service `a` that stands on the first of them, `w0`."""

    def __init__(self, members: int, config: Config | None = None, **fields: Any) -> None:
        self.since: dict[AttemptName, int] = {}
        self.does: dict[str, tuple[int, str]] = {}  # by job that does not stay: see `DOES`
        self.fewest = members  # of the service, that were ready after a record, whichever version they are
        self.most = 0  # of the job `a`, that had a place after a record
        super().__init__(config)
        self.join_host("w0", members)
        self.serve("a", **{"replicas": members, **fields})
        self.watch(10)
        assert (self.serving("a"), self.held_on("w0")) == (members, members)
        self.fewest, self.most = members, 0

    def join_host(self, name: str, gpus: int, model: str = H100) -> None:
        self.worker(name, gpus, model, capabilities=CALLS)

    def serve(self, job: str, **fields: Any) -> None:
        answer = self.submit(job, **{"gpu": {}, "service": {"name": "embed"}, "run": READY, **fields})
        assert answer["kind"] == "accepted", answer

    def watch(self, seconds: int, until: Callable[[], bool] = lambda: False, look_ms: int = 0) -> bool:
        """Let seconds pass, until something is so; return whether it came to that.

        With `look_ms` what happens is recorded only so much later, by a record that looks at all services again.
        """
        for _ in range(seconds):
            if until():
                return True
            self.pass_time(1_000, step=500)
            for worker in self.workers.values():
                for held in [held for held in worker.held.values() if held.phase == "running"]:
                    self._go_on(worker.id, held)
            if look_ms:
                self.offer_reports()
                self.tick(look_ms)
            self.settle()
            self.leave()
        return until()

    def tell_to_end(self, name: str, within_s: int) -> None:
        """SIGTERM: the worker says so with each renewal, and ends what it still holds once the time is over."""
        if self.workers[name].session:
            self.workers[name].leaving_s = within_s

    def leave(self) -> None:
        """A second is over for workers that were told to end."""
        for worker in self.workers.values():
            if worker.leaving_s is not None and worker.session:
                self._leave(worker, worker.leaving_s - 1)

    def _leave(self, worker: Worker, left_s: int) -> None:
        worker.leaving_s = max(0, left_s)
        if left_s <= 0:
            for key in list(worker.held):
                worker.finish(key, -15, "fence")  # unasked by the scheduler, that is its word
            self.report_all(worker.id)
        if not worker.held:
            self.send(worker.id, Goodbye(worker.session))
            worker.session, worker.leaving_s = "", None
            self.tick()

    def tick(self, ms: int = 1, *, obey: bool = True) -> Outputs:
        """One record; then it is counted who serves."""
        out = super().tick(ms, obey=obey)
        self.fewest = min(self.fewest, self.serving("a") + self.serving("b"))
        found = self.state.job("t", "a")
        self.most = max(self.most, sum(row.attempt is not None for row in found.rows.values()) if found else 0)
        return out

    def _go_on(self, worker: str, held: HeldAttempt) -> None:
        ran_ms = self.now - self.since.setdefault(held.name, self.now)
        ends_ms, how = self.does.get(held.place.job, (10**9, ""))
        if ran_ms >= ends_ms:
            self.workers[worker].finish(held.name, 1, how)
        elif ran_ms >= WARM_MS and held.place.job in ("a", "b") and how != "not-ready":
            self.workers[worker].look(held, ready=True)
            name = held.place.job, held.place.replica, held.place.fence, held.place.attempt
            idle = MemberLoad(f"m{held.place.fence}-{held.place.replica}", 1, 0, 0, 0, False, 0, 0, 0, 0, 0, 0, *name)
            self.engine.offer_member_load("t", "s", idle, self.now)

    def offer_reports(self) -> None:
        """Send what the workers have gathered, for the next record."""
        for worker in self.workers.values():
            if worker.session and (frame := worker.report_frame()) is not None:
                self.send(worker.id, frame)
                worker.report_answered(frame.no)

    def serving(self, job: str) -> int:
        """How many members of a job run and are ready."""
        found = self.state.job("t", job)
        asks = found is not None and self.engine.reader.request_of(found).workload.ready is not None
        rows = [row for row in found.rows.values() if row.state == RUNNING] if found is not None else []
        return sum(row.attempt is not None and (row.attempt.ready or not asks) for row in rows)

    def held_on(self, worker: str) -> int:
        return len(self.workers[worker].held)


# ------------------------------------------------------------------------------------- members that move

MEMBERS: Final = pytest.mark.parametrize("members", [1, 2, 3])
ASKS: Final = pytest.mark.parametrize(
    "asks",
    [{}, {"gpu": None}, {"run": {name: value for name, value in READY.items() if name != "ready"}}],
    ids=["with GPUs", "without GPUs", "without a check"],
)
WITHIN: Final = pytest.mark.parametrize("within", [{}, {"within_s": 40}], ids=["no deadline", "a deadline"])


@MEMBERS
@ASKS
@WITHIN
def test_a_drain_moves_a_service_without_a_gap(members: int, asks: dict[str, Any], within: dict[str, Any]) -> None:
    site = Site(members, **asks)
    site.join_host("w1", members)
    site.operate("drain", "w0", **within)
    site.watch(WATCHED_S)
    assert (site.held_on("w0"), site.held_on("w1")) == (0, members)
    assert site.fewest == members
    assert site.most <= members + 1, "one at a time"
    assert site.job("a").state == "RUNNING"


def test_a_replacement_is_placed_with_the_record_that_changes_max_running() -> None:
    site = Site(2)
    site.join_host("w1", 1)
    site.operate("drain", "w0")
    while site.job("a").relocating is None:
        site.tick(100)
    site.engine.offer(ChangeOrder("t", ChangeAsked(job="a", max_running=2), "", True))
    site.tick()
    assert site.job("a").on_workers == 3


def test_the_replacement_is_one_more_replica_that_goes_when_the_old_one_is_over() -> None:
    site = Site(1)
    site.join_host("w1", 1)
    before = site.attempt("a").name
    site.operate("drain", "w0")
    assert site.watch(WATCHED_S, lambda: site.held_on("w1") == 1)
    [held] = site.workers["w1"].held.values()
    assert before in site.workers["w0"].held, "the old one still serves"
    assert held.place.replica == 1, "never a second attempt of a replica that has one"
    site.watch(WATCHED_S)
    assert [row.index for row in site.job("a").rows.values()] == [1]


def test_a_drain_without_a_deadline_ends_no_member_that_has_no_other_place() -> None:
    site = Site(2)
    site.operate("drain", "w0")
    site.watch(WATCHED_S)
    assert (site.fewest, site.held_on("w0")) == (2, 2)


@pytest.mark.parametrize("members", [1, 2])
def test_a_deadline_goes_before_a_replacement_that_finds_no_place(members: int) -> None:
    site = Site(members)
    site.operate("drain", "w0", within_s=40)
    site.watch(25)
    assert site.fewest == members, "until then they serve"
    site.watch(WATCHED_S)
    assert site.held_on("w0") == 0


def test_where_one_place_is_free_one_of_two_moves_before_the_deadline() -> None:
    site = Site(2)
    site.join_host("w1", 1)
    site.operate("drain", "w0", within_s=40)
    site.watch(25)
    assert (site.fewest, site.held_on("w1")) == (2, 1)
    site.watch(WATCHED_S)
    assert (site.fewest, site.held_on("w0")) == (1, 0)


@pytest.mark.parametrize("limit", [{"gpus": 2}, {"gpus": 2, "jobs": 1}])
def test_a_replacement_counts_towards_its_tenants_limit(limit: dict[str, int]) -> None:
    site = Site(2)
    site.join_host("w1", 2)
    site.order("limit", **limit)
    site.operate("drain", "w0", within_s=40)
    site.watch(25)
    assert (site.fewest, site.held_on("w0"), site.held_on("w1")) == (2, 2, 0)
    site.watch(WATCHED_S)
    assert (site.held_on("w0"), site.held_on("w1")) == (0, 2)


def preempted(members: int, grace_s: int = 30) -> Site:
    """A service whose host another job has the right to, with room on another one."""
    site = Site(members, PREEMPTS, gpu={"model": ["H100", "L40S"]}, run={**READY, "grace_s": grace_s})
    site.join_host("w1", members, L40S)
    site.watch(70)
    site.submit("urgent", priority=90, gpu={"model": "H100", "count": members})
    return site


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("leads", ["", "a new one leads"])
def test_preemption_waits_for_the_replacement_as_long_as_the_grace_allows(members: int, leads: str) -> None:
    site = preempted(members)
    if leads:
        assert site.watch(10, lambda: site.held_on("w1") > 0)
        site.lead_from_snapshot()
        site.renew()
    site.watch(WATCHED_S)
    assert site.states("urgent") == ["RUNNING"]
    assert (site.fewest, site.held_on("w1")) == (members, members)
    assert (site.job("a").size, site.job("a").relocating) == (members, None)


def test_the_grace_of_a_preempted_member_ends_it_though_its_replacement_is_not_ready() -> None:
    site = preempted(1, grace_s=5)
    site.does["a"] = (10**9, "not-ready")
    assert site.watch(10, lambda: site.states("urgent") == ["RUNNING"])
    assert (site.fewest, site.held_on("w1")) == (0, 1)


def test_a_preempted_member_goes_on_once_the_other_job_waits_no_more() -> None:
    site = preempted(1)
    assert site.watch(10, lambda: site.held_on("w1") == 1)
    site.cancel("urgent")
    site.watch(WATCHED_S)
    assert (site.fewest, site.held_on("w0"), site.held_on("w1")) == (1, 1, 0)
    assert site.job("a").numbers == ((0, 0),)


@pytest.mark.parametrize("members", [1, 2])
def test_preemption_ends_what_finds_no_other_place(members: int) -> None:
    """Long before its grace is over, which no replacement would use."""
    site = Site(members, PREEMPTS, run={**READY, "grace_s": 600})
    site.watch(70)
    site.submit("urgent", priority=90, gpu={"count": members})
    site.watch(20)
    assert site.states("urgent") == ["RUNNING"]


@pytest.mark.parametrize("members", [1, 2])
def test_a_gpu_that_is_out_waits_for_no_replacement(members: int) -> None:
    site = Site(members)
    site.join_host("w1", 1)
    out = next(iter(site.workers["w0"].held.values())).place.slots[0]
    site.workers["w0"].unwell = [Unwell(out, "xid", "Xid 79: the GPU has fallen off the bus", True)]
    site.watch(3)
    assert site.held_on("w0") == members - 1
    site.watch(20)
    assert (site.serving("a"), site.held_on("w1")) == (members, 1)
    assert site.fewest == members - 1


@MEMBERS
@ASKS
@pytest.mark.parametrize("leads", ["", "a new one leads"])
def test_a_worker_that_is_told_to_end_leaves_a_service_without_a_gap(
    members: int, asks: dict[str, Any], leads: str
) -> None:
    site = Site(members, **asks)
    site.join_host("w1", members)
    site.tell_to_end("w0", 40)
    if leads:
        assert site.watch(10, lambda: site.held_on("w1") > 0)
        site.lead()
        site.renew()
    site.watch(WATCHED_S)
    assert (site.workers["w0"].session, site.held_on("w1")) == ("", members)
    assert site.fewest == members
    assert site.most <= members + 1, "one at a time"


@pytest.mark.parametrize("members", [1, 2])
def test_a_member_without_another_place_serves_until_its_worker_ends(members: int) -> None:
    site = Site(members)
    site.tell_to_end("w0", 40)
    site.watch(35)
    assert (site.fewest, site.held_on("w0")) == (members, members)
    site.watch(5)
    assert site.workers["w0"].told["exited"] == members
    site.join_host("w1", members)
    site.watch(10)
    assert site.serving("a") == members, "asked to end by the scheduler, it waits for no back-off"


@pytest.mark.parametrize("how", ["its next version loads", "its job is held", "it is not ready for a moment"])
def test_a_member_that_cannot_move_serves_on_a_leaving_worker_until_its_end(how: str) -> None:
    site = Site(2)
    site.join_host("w1", 2)
    if how == "its next version loads":
        site.does["b"] = (10**9, "not-ready")
        site.serve("b", replicas=2, instead_of="a")
    elif how == "its job is held":
        site.order("hold", job="a")
    else:
        site.operate("cordon", "w1")
    site.watch(3)
    site.tell_to_end("w0", 40)
    site.watch(2)
    if how == "it is not ready for a moment":
        site.workers["w0"].look(next(iter(site.workers["w0"].held.values())), ready=False)
        site.offer_reports()
        site.pass_time(1_000)
        assert site.fewest == 1
        site.fewest = 2
    site.watch(32)
    assert (site.serving("a"), site.placed_on("a")[:2]) == (2, ["w0", "w0"])
    site.watch(5)
    assert site.held_on("w0") == 0


def test_a_member_that_was_never_ready_ends_at_once_on_a_leaving_worker() -> None:
    site = Site(1)
    site.join_host("w1", 1)
    site.does["b"] = (10**9, "not-ready")
    site.serve("b", service={"name": "other"})
    site.watch(2)
    assert site.placed_on("b") == ["w1"]
    site.join_host("w2", 1)
    site.tell_to_end("w1", 40)
    site.watch(3)
    assert (site.workers["w1"].session, site.placed_on("b")) == ("", ["w2"])


def test_a_replacement_that_fails_ends_no_member_on_a_leaving_worker() -> None:
    site = Site(2, run={name: value for name, value in READY.items() if name != "restart"})
    site.join_host("w1", 2)
    site.tell_to_end("w0", 40)
    assert site.watch(10, lambda: site.held_on("w1") == 1)
    site.workers["w1"].finish(next(iter(site.workers["w1"].held)), 1)
    site.watch(20)
    assert (site.fewest, site.held_on("w0")) == (2, 2)
    site.watch(WATCHED_S)
    assert site.workers["w0"].session == ""


def test_what_is_no_service_is_asked_to_end_at_once_and_loses_no_retry() -> None:
    site = Site(1)
    site.join_host("w1", 1)
    site.submit("train", gpu={}, run={"driver": "process", "argv": ["train"]})
    site.watch(2)
    assert site.attempt("train").worker.id == "w1"
    site.join_host("w2", 1)
    site.tell_to_end("w1", 40)
    site.watch(4)
    assert (site.workers["w1"].session, site.states("train")) == ("", ["RUNNING"])
    assert site.attempt("train").worker.id == "w2"


@pytest.mark.parametrize(("within_s", "notice_s"), [(40, 20), (10, 7)])
def test_a_checkpoint_signal_comes_as_early_as_the_leaving_worker_allows(within_s: int, notice_s: int) -> None:
    site = Site(1)
    site.join_host("w1", 1)
    run = {"driver": "process", "argv": ["train"], "checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 20}
    site.submit("train", gpu={}, run=run)
    site.watch(2)
    site.tell_to_end("w1", within_s)
    site.workers["w1"].auto = False
    site.renew()
    while not (ends := [end for frame in site.wanted for end in frame.end]):
        site.tick(100)
    assert [(end.job, end.notice_s) for end in ends] == [("train", notice_s)]


def test_nothing_is_placed_on_a_worker_that_leaves_until_it_joins_again() -> None:
    site = Site(1)
    site.tell_to_end("w0", 40)
    site.renew()
    [told] = views.fleet(site.engine, site.now).workers
    assert (told.state, told.flag) == ("leaving", "open")
    site.submit("next", gpu=None, run={"driver": "process", "argv": ["train"]})
    assert site.states("next") == ["QUEUED"]
    explained = site.explained("next")
    assert explained["reason"] == "closed"
    assert "w0: leaving, as it was told to end" in str(explained)
    site.watch(45)
    assert site.workers["w0"].session == ""
    site.join(site.workers["w0"])
    site.watch(10)
    assert (site.serving("a"), site.states("next")) == (1, ["RUNNING"])


def test_an_operators_drain_outlives_the_workers_own_end() -> None:
    site = Site(1)
    site.operate("drain", "w0")
    site.tell_to_end("w0", 10)
    site.watch(15)
    site.join(site.workers["w0"])
    site.watch(10)
    assert (site.state.workers["w0"].flag, site.held_on("w0")) == ("draining", 0)


# ------------------------------------------------------------------------------------- where members are put


def spread(members: int, hosts: int, **asks: Any) -> list[int]:
    """How many members of a service each host has, the fewest first."""
    drive = Driving.with_hosts(*[4] * hosts, capabilities=CALLS)
    fields = {"gpu": {}, "service": {"name": "embed"}, "run": READY, "replicas": members, **asks}
    assert drive.submit("a", **fields)["kind"] == "accepted"
    drive.settle()
    return sorted(len(worker.held) for worker in drive.workers.values())


@pytest.mark.parametrize("gpu", [{}, None], ids=["with GPUs", "without GPUs"])
@pytest.mark.parametrize(("members", "found"), [(2, [1, 1]), (4, [2, 2])])
def test_members_spread_over_hosts(gpu: dict[str, Any] | None, members: int, found: list[int]) -> None:
    assert spread(members, 2, gpu=gpu) == found


def test_members_spread_over_the_hosts_that_have_room() -> None:
    site = Site(1)
    site.join_host("w1", 2)
    site.join_host("w2", 2)
    site.serve("other", service={"name": "other"}, replicas=2)
    site.watch(3)
    assert (site.held_on("w1"), site.held_on("w2")) == (1, 1)


def test_spreading_is_no_reason_to_wait() -> None:
    assert spread(3, 1) == [3]
    assert spread(5, 2, gpu={"count": 1}) in ([1, 4], [2, 3])


PACKED: Final = {"service": {"name": "embed", "pack": True}}


@pytest.mark.parametrize("asks", [{"gpu": {"scheduling": "best-effort"}}, PACKED, {"gpu": None, **PACKED}])
def test_who_wants_it_packs_as_the_ranker_does(asks: dict[str, Any]) -> None:
    assert spread(2, 2, **asks) == [0, 2]


def test_a_job_that_is_no_service_is_packed_as_before() -> None:
    assert spread(2, 2, service=None, run={"driver": "process", "argv": ["train"]}) == [0, 2]


# ------------------------------------------------------------------------------------- a next version, without room

KINDS: Final = pytest.mark.parametrize("kind", ["fixed", "follows"])
ONE_AND_TWO: Final = pytest.mark.parametrize("members", [1, 2])


def replaced(members: int, kind: str, does: str = "") -> Site:
    """A service without room for a second version, whose next one, `b`, does what is named."""
    replicas: Any = members if kind == "fixed" else {"min": members, "max": members + 1}
    site = Site(members, replicas=replicas)
    if does:
        site.does["b"] = DOES[does]
    site.serve("b", replicas=replicas, instead_of="a")
    return site


def begun(site: Site) -> bool:
    """Whether an attempt of the next version has a place."""
    return any(row.attempt is not None for row in site.job("b").rows.values())


def over(site: Site) -> bool:
    """Whether an attempt of the next version has ended."""
    return any(row.attempt_no and row.attempt is None for row in site.job("b").rows.values())


@KINDS
@ONE_AND_TWO
@pytest.mark.parametrize("does", ["fails at its start", "fails its check"])
def test_the_old_version_has_its_place_back_once_the_new_one_fails(kind: str, members: int, does: str) -> None:
    site = replaced(members, kind, does)
    assert site.watch(WATCHED_S, lambda: over(site)), "it had the place of one"
    assert site.fewest >= members - 1, "one at a time"
    assert site.watch(30, lambda: site.serving("a") == members)
    site.fewest = members
    site.watch(WATCHED_S)
    assert site.fewest == members, "it serves while the new one fails"
    assert "CANCELLED" not in site.states("a")


@KINDS
@ONE_AND_TWO
@pytest.mark.parametrize("when", ["it waits for the place", "it loads there"])
def test_the_old_version_has_its_place_back_once_the_new_one_is_cancelled(kind: str, members: int, when: str) -> None:
    site = replaced(members, kind)
    if when == "it loads there":
        assert site.watch(WATCHED_S, lambda: begun(site))
    else:
        assert site.watch(WATCHED_S, lambda: site.serving("a") < members)
    site.cancel("b")
    assert site.watch(30, lambda: site.serving("a") == members)
    assert "CANCELLED" not in site.states("a")
    site.fewest = members
    site.watch(WATCHED_S)
    assert site.fewest == members


@KINDS
@ONE_AND_TWO
def test_what_was_replaced_stays_so_though_the_new_version_ends_later(kind: str, members: int) -> None:
    site = replaced(members, kind)
    assert site.watch(WATCHED_S, lambda: site.serving("b") == members)
    site.watch(10)
    assert set(site.states("a")) == {"CANCELLED"}
    whys = {change.get("why") for event in site.events for change in event["changes"] if event["job"] == "a"}
    assert "replaced by job b" in whys
    site.does["b"] = DOES["ends later"]
    assert site.watch(30, lambda: site.serving("b") == 0)
    del site.does["b"]
    site.watch(WATCHED_S)
    assert (site.serving("b"), set(site.states("a"))) == (members, {"CANCELLED"})


@KINDS
def test_one_of_two_that_was_ready_and_ends_keeps_the_place(kind: str) -> None:
    site = replaced(2, kind, "ends later")
    assert site.watch(WATCHED_S, lambda: over(site))
    del site.does["b"]
    assert not site.watch(2 * WATCHED_S, lambda: site.serving("a") == 2)
    assert (site.serving("b"), set(site.states("a"))) == (2, {"CANCELLED"})


@ONE_AND_TWO
def test_only_what_was_replaced_is_said_to_be(members: int) -> None:
    site = replaced(members, "fixed", "fails its check")
    site.watch(WATCHED_S)
    ends = [change for event in site.events if event["job"] == "a" for change in event["changes"]]
    assert not [change for change in ends if change["state"] == "CANCELLED"]


@pytest.mark.parametrize("how", ["requeued", "fenced", "its host began anew", "its host is gone"])
def test_a_next_version_whose_attempt_did_not_end_by_itself_has_not_failed(how: str) -> None:
    site = Site(1)
    site.join_host("w1", 1)
    site.serve("b", instead_of="a")
    site.settle()
    w1 = site.workers["w1"]
    assert site.states("b") == ["RUNNING"], "it is not ready yet"
    site.operate("cordon", "w1")
    if how == "requeued":
        site.order("requeue", job="b")
    elif how == "its host is gone":
        w1.session = ""
    else:
        w1.fence() if how == "fenced" else w1.die()
        site.join(w1)
    site.settle()
    assert site.watch(300, lambda: site.serving("b") == 1), "the old version gave way to it"
    assert site.held_on("w0") == 1


# ------------------------------------------------------------------------- a next version that serves for a moment


def beside(old: int, room: int, does: str = "", **fields: Any) -> Site:
    """A service, and its next version `b` with room for so many more."""
    site = Site(old)
    site.join_host("w1", room)
    if does:
        site.does["b"] = DOES[does]
    site.serve("b", **{"replicas": old, "instead_of": "a", **fields})
    return site


@pytest.mark.parametrize("room", [0, 3])
def test_a_next_version_that_is_ready_and_ends_after_seconds_takes_no_place(room: int) -> None:
    site = beside(3, room, "ends soon") if room else replaced(3, "fixed", "ends soon")
    site.watch(2 * WATCHED_S)
    assert site.fewest >= (3 if room else 2), "with room none; without, one may give way first"
    assert site.serving("a") == 3
    assert "CANCELLED" not in site.states("a")


@pytest.mark.parametrize("most", [1, 2])
def test_a_next_version_waits_for_no_place_while_its_own_max_running_keeps_it(most: int) -> None:
    """Its other members have waited for longer than any place takes, as one ends for good while there is room."""
    site = beside(3, 8, replicas=6, max_running=most, run={**READY, "argv": ["next"], "max_restarts": 1})
    site.does["b"] = (6_000, "exit")  # ready for less long than counts
    assert site.watch(WATCHED_S, lambda: "FAILED" in site.states("b"), look_ms=1_000)
    site.watch(2 * WATCHED_S, look_ms=1_000)
    assert (site.fewest, site.serving("a")) == (3, 3)


def test_a_next_version_that_fails_gives_back_what_it_took() -> None:
    site = beside(3, 3, run={**READY, "max_restarts": 2})
    assert site.watch(WATCHED_S, lambda: site.serving("b") == 3)
    site.does["b"] = DOES["ends soon"]
    assert site.watch(WATCHED_S, lambda: site.job("b").over)
    assert site.states("b") == ["FAILED"] * 3
    site.fewest = 3
    assert site.watch(30, lambda: site.serving("a") == 3)
    site.watch(WATCHED_S)
    assert (site.fewest, site.serving("a")) == (3, 3)


@pytest.mark.parametrize("leads", ["", "from a snapshot", "from the ledger"])
def test_a_canary_that_is_cancelled_gives_its_place_back(leads: str) -> None:
    site = beside(3, 1, max_running=1)
    assert site.watch(WATCHED_S, lambda: site.serving("a") == 2)
    site.watch(10)
    assert (site.serving("a"), site.serving("b"), site.fewest) == (2, 1, 3)
    if leads:
        site.lead_from_snapshot() if leads == "from a snapshot" else site.lead()
        site.renew()
    site.cancel("b")
    assert site.watch(30, lambda: site.serving("a") == 3)
    assert site.fewest >= 2
    assert set(site.states("a")) == {"RUNNING"}


def test_a_canary_replaces_all_once_it_may() -> None:
    site = beside(3, 1, max_running=1)
    assert site.watch(WATCHED_S, lambda: site.serving("a") == 2)
    site.engine.offer(ChangeOrder("t", ChangeAsked(job="b", max_running=3), "", True))
    assert site.watch(2 * WATCHED_S, lambda: set(site.states("a")) == {"CANCELLED"})
    assert (site.fewest, site.serving("b")) == (3, 3)


def test_a_next_version_of_which_some_never_serve_and_that_is_cancelled() -> None:
    site = beside(3, 3)
    assert site.watch(WATCHED_S, lambda: site.serving("b") > 0)
    site.does["b"] = DOES["fails its check"]
    held = [(worker, name) for worker in site.workers.values() for name in worker.held if name[1] == "b"]
    for worker, name in sorted(held, key=lambda each: each[1])[1:]:
        worker.finish(name, 1, "not-ready")
    site.watch(WATCHED_S)
    assert site.fewest == 3, "for what serves of both"
    site.cancel("b")
    site.watch(30)
    assert site.serving("a") == 3


def test_a_member_that_has_settled_and_ends_gives_its_place_back_until_it_serves_again() -> None:
    site = beside(2, 2, max_running=1)
    assert site.watch(WATCHED_S, lambda: site.serving("a") == 1)
    [host] = [worker for worker in site.workers.values() if any(name[1] == "b" for name in worker.held)]
    host.session = ""  # it is not heard any more
    site.operate("cordon", host.id)
    site.fewest = 2
    assert site.watch(2 * WATCHED_S, lambda: site.serving("a") == 2)


@pytest.mark.parametrize(("copies", "most"), [(4, 2), (2, 1)])
@pytest.mark.parametrize("room", [0, 4])
def test_a_service_of_which_few_may_run_at_once_is_replaced(copies: int, most: int, room: int) -> None:
    site = Site(most, replicas=copies, max_running=most)
    if room:
        site.join_host("w1", room)
    site.serve("b", replicas=copies, max_running=most, instead_of="a")
    assert site.watch(4 * WATCHED_S, lambda: set(site.states("a")) == {"CANCELLED"})
    assert site.serving("b") == most
    assert site.fewest >= (most if room else most - 1)


@pytest.mark.parametrize("room", [1, 4])
def test_a_fixed_next_version_of_one_with_max_running_never_serves_with_fewer(room: int) -> None:
    site = Site(4, replicas=12, max_running=4)
    site.join_host("w1", room)
    site.serve("b", replicas=4, instead_of="a")
    assert site.watch(4 * WATCHED_S, lambda: set(site.states("a")) == {"CANCELLED"})
    assert (site.serving("b"), site.fewest) == (4, 4)


def test_a_service_that_has_not_all_its_places_lends_those_that_it_has() -> None:
    site = Site(2, replicas=3)
    site.serve("b", replicas=3, instead_of="a")
    assert site.watch(2 * WATCHED_S, lambda: site.serving("b") == 2)
    assert site.fewest == 1, "one at a time"


def test_a_move_that_is_given_up_leaves_no_more_than_max_running() -> None:
    site = Site(2, replicas=4, max_running=2)
    site.join_host("w1", 1)
    site.operate("drain", "w0")
    assert site.watch(WATCHED_S, lambda: site.held_on("w1") == 1)
    site.operate("uncordon", "w0")
    site.watch(WATCHED_S)
    assert (site.serving("a"), site.fewest) == (2, 2)


@pytest.mark.parametrize(("said_s", "takes_s"), [(0.0, 3), (20.0, 23)])
def test_a_member_counts_once_it_was_ready_for_as_long_as_its_request_says(said_s: float, takes_s: int) -> None:
    site = beside(1, 1, run={**READY, "ready": {"call": True, "for_s": said_s}})
    began_ms = site.now
    assert site.watch(WATCHED_S, lambda: site.states("a") == ["CANCELLED"])
    assert takes_s <= (site.now - began_ms) / 1_000 <= takes_s + 4


def looks(site: Site, *, ready: bool) -> None:
    """The worker of the one member of `b` looks at it."""
    for worker in site.workers.values():
        for held in [held for held in worker.held.values() if held.place.job == "b"]:
            worker.look(held, ready=ready)
    site.offer_reports()
    site.tick()


@pytest.mark.parametrize(("gap_ms", "counts"), [(1_500, True), (2_500, False)])
def test_a_short_gap_does_not_begin_the_time_anew(gap_ms: int, counts: bool) -> None:
    site = beside(1, 1)
    assert site.watch(WATCHED_S, lambda: site.serving("b") == 1)
    site.pass_time(3_000, step=500)
    looks(site, ready=False)
    site.pass_time(gap_ms, step=500)
    looks(site, ready=True)
    site.pass_time(2_000, step=500)
    assert (site.states("a") != ["RUNNING"]) is counts


def test_a_replacement_counts_once_it_was_ready_for_as_long_as_its_request_says() -> None:
    site = Site(1, run={**READY, "ready": {"call": True, "for_s": 20.0}})
    site.join_host("w1", 1)
    site.operate("drain", "w0")
    assert site.watch(WATCHED_S, lambda: site.serving("a") == 2)
    site.watch(15)
    assert site.held_on("w0") == 1
    site.watch(15)
    assert (site.held_on("w0"), site.fewest) == (0, 1)


def test_what_runs_beyond_a_lower_max_running_counts_as_what_served() -> None:
    site = Site(4)
    site.engine.offer(ChangeOrder("t", ChangeAsked(job="a", max_running=2), "", True))
    site.join_host("w1", 4)
    site.serve("b", replicas=4, max_running=2, instead_of="a")
    site.watch(WATCHED_S)
    assert (site.serving("a"), site.serving("b"), site.fewest) == (2, 2, 4)
