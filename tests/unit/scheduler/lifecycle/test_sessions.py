"""Workers' sessions: joins by number, boot and machine; adoption; reports lost, doubled, out of order; renewals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from moorage.scheduler.core.config import CLUSTER_DEFAULTS, Config
from moorage.scheduler.core.ledger.acts import Gone
from moorage.scheduler.core.ledger.ceilings import CEILINGS
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.lifecycle.stale_ledger import StaleLedgerGuard
from moorage.schemas.attempt import name_in
from moorage.schemas.codec import is_json
from moorage.schemas.frames import Device, Goodbye, Held, Hello, Join, Renew, Report, ReportFrame, ReportKind
from tests.unit.scheduler.driving import H100, Driving
from tests.unit.scheduler.honest_worker import Worker, devices


def held(drive: Driving, job: str, replica: int = 0, phase: str = "running") -> Held:
    attempt = drive.attempt(job, replica)
    return Held("t", job, replica, attempt.no, attempt.fence, phase)


def report_of(drive: Driving, kind: ReportKind, job: str, replica: int = 0, code: int = 0, detail: str = "") -> Report:
    attempt = drive.attempt(job, replica)
    return Report(kind, "t", job, replica, attempt.no, attempt.fence, code, detail)


# ------------------------------------------------------------------------------------------------------------ joins


def test_a_join_gives_a_session_and_the_numbers() -> None:
    drive = Driving()
    worker = drive.worker("w0")
    assert len(worker.session) == 32
    answer = drive.join(worker, Join(worker.machine, worker.boot, 1, worker.hello))
    assert answer == {
        "kind": "joined", "session": worker.session, "n": 1, "reign": 1, "renew_s": 2.0, "lease_s": 20.0,
        "grace_s": 5.0, "ledger": "ledger-1", "v": 1, "formerly": "",
    }  # fmt: skip


@pytest.mark.parametrize("json", [True, False])
def test_the_form_of_a_join_holds_for_the_session_and_for_the_next_leader(json: bool) -> None:
    drive = Driving()
    drive.json_workers = json
    drive.worker("w0", 4)
    drive.json_workers = False
    for job in ("plain", "later"):
        body = msgspec.msgpack.encode({"job": job, "gpu": {}, "run": {"driver": "noop"}})
        drive.offer_submit(job, body=body)
        out = drive.tick(obey=job == "plain")
        assert [is_json(payload) for _, payload, _ in out.messages] == [json]
        assert is_json(drive.wanted[0].place[0].body) == json
        drive.lead_from_snapshot()
        drive.renew()
    assert drive.state.workers["w0"].inventory.json == json


@pytest.mark.parametrize(
    ("n", "boot", "machine", "outcome"),
    [
        (5, "boot-1", "machine-w0", "standing"),
        (6, "boot-1", "machine-w0", "fresh"),
        (6, "boot-2", "machine-w0", "fresh"),
        (5, "boot-2", "machine-w0", "stale-join"),
        (4, "boot-1", "machine-w0", "stale-join"),
        (9, "boot-1", "another", "worker-id-in-use"),
    ],
)
def test_join_by_number_boot_and_machine(n: int, boot: str, machine: str, outcome: str) -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    worker.n = 4
    drive.join(worker)
    session = worker.session
    answer = drive.join(worker, Join(machine, boot, n, worker.hello))
    if outcome == "standing":
        assert answer["session"] == session
    elif outcome == "fresh":
        assert answer["session"] not in (session, "")
    else:
        assert answer["code"] == outcome


@pytest.mark.parametrize(
    ("boot", "said"),
    [
        ("boot-1.9", "a worker of the same machine, with another state folder, has the id w0"),
        ("boot-2.9", "a worker of another machine has the id w0"),
    ],
)
def test_a_worker_whose_id_is_taken_hears_from_where_and_which_flag_helps(boot: str, said: str) -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    answer = drive.join(worker, Join("another", boot, 1, worker.hello))
    assert answer["code"] == "worker-id-in-use"
    assert said in answer["message"]
    assert "--id" in answer["next"]


@pytest.mark.parametrize("how", ["lost", "goodbye"])
def test_another_machine_may_have_the_id_after_lost_or_goodbye(how: str) -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    drive.submit("j", gpu={})
    if how == "goodbye":
        drive.send("w0", Goodbye(worker.session))
        drive.tick()
    else:
        drive.pass_time(30_000, renew=False)
    assert drive.state.workers["w0"].session == ""
    worker.machine, worker.n = "another", 0
    drive.join(worker)
    assert drive.state.workers["w0"].machine == "another"
    drive.pass_time(1_000)
    assert drive.states("j") == ["PLACED"]


@pytest.mark.parametrize("how", ["lost", "goodbye"])
@pytest.mark.parametrize(("boot", "outcome"), [("boot-1", "stale-join"), ("boot-2", "joined")])
def test_a_join_that_comes_late_or_twice_does_not_bring_back_who_is_gone(how: str, boot: str, outcome: str) -> None:
    """It did, and until that session was lost, jobs were placed where nobody was. A journal that was lost may begin
    again at 1, but in another boot."""
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    join = Join(worker.machine, worker.boot, worker.n, worker.hello)
    if how == "goodbye":
        drive.send("w0", Goodbye(worker.session))
        drive.tick()
    else:
        drive.pass_time(30_000, renew=False)
    answer = drive.join(worker, msgspec.structs.replace(join, boot=boot))
    assert (answer.get("code") or answer["kind"]) == outcome
    assert bool(drive.state.workers["w0"].session) == (outcome == "joined")


def test_two_joins_of_one_worker_in_one_record() -> None:
    drive = Driving()
    worker = drive.worker("w0")
    replies = [drive.send("w0", Join(worker.machine, worker.boot, n, worker.hello)) for n in (2, 2, 3)]
    drive.tick()
    drive.tick()
    drive.tick()
    sessions = [drive.answers[reply]["session"] for reply in replies]
    assert sessions[0] == sessions[1] != sessions[2]
    assert drive.state.workers["w0"].session == sessions[2]


def test_a_new_worker_and_one_that_changed_machines_in_one_record() -> None:
    drive = Driving()
    worker = drive.worker("w0")
    drive.send("w0", Goodbye(worker.session))
    drive.tick()
    new = Hello("w1", "b", drivers=["noop"], gpu_pool=devices("w1", [H100]))
    replies = [
        drive.send("w0", Join("another", "b", 1, worker.hello)),
        drive.send("w1", Join("m1", "b", 1, new)),
        drive.send("w2", Join("m2", "b", 1, Hello("w2", "b"))),
    ]
    drive.tick()
    assert {drive.answers[reply]["kind"] for reply in replies} == {"joined"}
    assert [row.id for row in drive.state.workers.values()] == ["w0", "w1", "w2"]


def test_goodbye_then_a_join_in_one_record() -> None:
    drive = Driving()
    worker = drive.worker("w0")
    old = worker.session
    drive.send("w0", Goodbye(worker.session))
    answer = drive.join(worker, Join(worker.machine, worker.boot, worker.n + 1, worker.hello))
    assert answer["kind"] == "joined"
    assert answer["session"] != old
    assert drive.renew("w0")[0]["kind"] == "renewed"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"gpu_pool": [Device(i, "nvidia", H100, f"G{i}") for i in range(65)]}, "invalid-argument"),
        ({"gpu_pool": [Device(0, "nvidia", H100, "same"), Device(1, "nvidia", H100, "same")]}, "invalid-argument"),
        ({"gpu_pool": [Device(2**70, "nvidia", H100, "G")]}, "invalid-argument"),
        ({"gpu_pool": [Device(0, "nvidia", H100, "G", memory_mib=-1)]}, "invalid-argument"),
        ({"gpu_pool": [Device(0, "nvidia", H100, "G", numa=2**70)]}, "invalid-argument"),
        ({"gpu_pool": [Device(0, "nvidia", H100, "G", peers=[-1])]}, "invalid-argument"),
        ({"cpu_milli": 2**64}, "invalid-argument"),
        ({"memory_mib": -5}, "invalid-argument"),
        ({"sharers_max": {"mps": 2**80}}, "invalid-argument"),
        ({"lent_slots": [-1]}, "invalid-argument"),
        ({"lent_slots": [2**62]}, "invalid-argument"),
        ({"v": 2**70}, "invalid-argument"),
        ({"labels": {f"k{i}": "x" * 1000 for i in range(100)}}, "too-large"),
    ],
)  # fmt: skip
def test_a_monstrous_hello_is_refused_not_fatal(change: dict[str, Any], code: str) -> None:
    drive = Driving()
    hello = msgspec.structs.replace(Hello("w0", "b", gpu_pool=devices("w0", [H100])), **change)
    reply = drive.send("w0", Join("m", "b", 1, hello))
    drive.tick()
    assert drive.answers[reply]["code"] == code
    assert drive.state.workers == {}
    drive.lead()


@pytest.mark.parametrize("change", [{"n": 2**70}, {"n": -1}, {"boot": "b" * 70_000}, {"machine": "m" * 70_000}])
def test_a_monstrous_join_is_refused_not_fatal(change: dict[str, Any]) -> None:
    drive = Driving()
    reply = drive.send("w0", msgspec.structs.replace(Join("m", "b", 1, Hello("w0", "b")), **change))
    drive.tick()
    assert drive.answers[reply]["kind"] == "error"


def test_lent_slots_twice_lend_nothing_more() -> None:
    drive = Driving.with_hosts(4, lent_slots=[1, 1, 3])
    assert drive.engine.fleet.hosts[0].lent == 0b1010
    drive.submit("j", replicas=3, gpu={})
    assert drive.states("j") == ["PLACED", "PLACED", "QUEUED"]


# --------------------------------------------------------------------------------------------------------- adoption


def test_an_agents_restart_adopts_what_it_lists_and_only_that() -> None:
    drive = Driving()
    worker = drive.worker("w0", 4, auto=False)
    for name in ("listed", "placed", "gone", "unplaced"):
        drive.submit(name, gpu={}, retries_on_lost=0)
    drive.reports([("claimed", "listed", 0, 0, ""), ("claimed", "gone", 0, 0, "")])
    drive.reports([("started", "listed", 0, 0, ""), ("started", "gone", 0, 0, "")])
    holding = [held(drive, "listed"), held(drive, "placed", phase="claimed")]
    fences = {name: drive.replica(name).fence for name in ("listed", "placed")}
    worker.n += 1
    drive.join(worker, Join(worker.machine, worker.boot, worker.n, worker.hello, holding=holding))
    assert drive.states("listed") == ["RUNNING"]
    assert drive.states("placed") == ["PLACED"]
    assert drive.states("gone") == ["FAILED"]
    assert drive.states("unplaced") == ["QUEUED"], "it never began: no loss to count"
    assert {name: drive.replica(name).fence for name in fences} == fences
    assert drive.free_gpus() == 2


def moved_on() -> tuple[Driving, Worker]:
    """An attempt that failed on a worker where its GPU is not free yet; the next one is placed on another worker."""
    drive = Driving()
    before = drive.worker("w0", auto=False)
    drive.submit("j", gpu={}, retries=1, on_partition="keep")
    before.obey(*drive.wanted)
    drive.report_all("w0")
    before.finish(drive.attempt("j").name, 1, freed=False)
    drive.report_all("w0")
    drive.worker("w1", auto=False)
    drive.pass_time(5_000)
    assert drive.placed_on("j") == ["w1"]
    return drive, before


def test_an_attempt_that_is_over_is_not_sent_to_its_worker_again() -> None:
    """Its worker began a new session: it got the old attempt, beside the next one."""
    drive, before = moved_on()
    drive.wanted.clear()
    drive.send("w0", before.join_frame())
    drive.tick(obey=False)
    assert [name_in(place) for frame in drive.wanted for place in frame.place] == []


def test_an_attempt_whose_gpus_are_not_free_yet_has_no_part_in_what_becomes_of_the_next_one() -> None:
    """The next one was kept through a partition, or asked to end: that was told of the worker of the one before."""
    drive, before = moved_on()
    drive.order("requeue", job="j")
    assert drive.states("j") == ["ENDING"]
    told = [drive.operate("cordon", name) for name in ("w0", "w1")]
    assert [(answer["members"], answer.get("ending", 0)) for answer in told] == [(1, 0), (1, 1)]
    drive.workers["w1"].session = ""
    drive.pass_time(40_000)
    assert drive.states("j") == ["LOST_KEPT"]
    answer = drive.join(before, Join("another", "boot-9.9", 1, before.hello))
    assert "a worker of another machine has the id w0" in answer["message"]


def test_reports_come_under_their_old_names_before_the_rest_is_declared_over() -> None:
    drive = Driving()
    worker = drive.worker("w0", 2, auto=False)
    drive.submit("won", gpu={}, retries_on_lost=0)
    drive.submit("lingers", gpu={}, retries_on_lost=0)
    drive.reports([("claimed", "won", 0, 0, ""), ("claimed", "lingers", 0, 0, "")])
    reports = [
        report_of(drive, "started", "won"),
        report_of(drive, "exited", "won", detail="exit"),
        report_of(drive, "freed", "won"),
        report_of(drive, "exited", "lingers", detail="exit"),
    ]
    holding = [held(drive, "lingers", phase="exited")]
    worker.n += 1
    drive.join(worker, Join(worker.machine, "boot-2", worker.n, worker.hello, reports=reports, holding=holding))
    assert (drive.states("won"), drive.states("lingers")) == (["SUCCEEDED"], ["SUCCEEDED"])
    assert drive.free_gpus() == 1
    drive.reports([("freed", "lingers", 0, 0, "")])
    assert drive.free_gpus() == 2


def test_reports_of_the_old_session_do_not_number_the_new_one() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1, auto=False)
    drive.submit("j", gpu={})
    old = worker.session
    claimed, started = report_of(drive, "claimed", "j"), report_of(drive, "started", "j")
    replies = [
        drive.send("w0", ReportFrame(old, 1, [claimed])),
        drive.send("w0", ReportFrame(old, 2, [started])),
        drive.send(
            "w0", Join(worker.machine, "boot-1", 2, worker.hello, reports=[started], holding=[held(drive, "j")])
        ),
        drive.send("w0", ReportFrame(old, 3, [report_of(drive, "exited", "j")])),
    ]
    drive.tick()
    assert [drive.answers[reply].get("code", drive.answers[reply]["kind"]) for reply in replies] == [
        "recorded", "recorded", "joined", "session-over",
    ]  # fmt: skip
    assert drive.states("j") == ["RUNNING"]
    assert drive.state.workers["w0"].no == 0
    worker.session = drive.answers[replies[2]]["session"]
    drive.send("w0", ReportFrame(worker.session, 1, [report_of(drive, "exited", "j", detail="exit")]))
    drive.tick()
    assert drive.states("j") == ["SUCCEEDED"]


def test_devices_that_moved_are_no_ground_for_a_second_attempt() -> None:
    drive = Driving()
    worker = drive.worker("w0", 2, auto=False)
    drive.submit("a", gpu={})
    drive.submit("b", gpu={})
    drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, "")])
    pool = worker.hello.gpu_pool
    fewer = msgspec.structs.replace(worker.hello, gpu_pool=pool[1:])  # slot 0 shows another device now
    answer = drive.join(worker, Join(worker.machine, "boot-1", 2, fewer, holding=[held(drive, "a")]))
    assert answer["code"] == "failed-precondition"
    assert drive.states("a") == ["RUNNING"], "it lives on there: nothing may run beside it"
    exited = [report_of(drive, "exited", "a", detail="exit")]
    answer = drive.join(
        worker, Join(worker.machine, "boot-1", 2, fewer, reports=exited, holding=[held(drive, "a", phase="exited")])
    )
    assert answer["kind"] == "joined"
    assert drive.states("a") == ["SUCCEEDED"]
    more = msgspec.structs.replace(worker.hello, gpu_pool=[pool[1], Device(7, "nvidia", H100, "new")])
    drive.tick()
    assert drive.states("b") == ["QUEUED"] or drive.slots("b") == [0]
    drive.pass_time(1_000)
    drive.join(worker, Join(worker.machine, "boot-1", 3, more, holding=[held(drive, "b")]))
    assert drive.states("b") == ["PLACED"], "its slot shows what it showed"


def test_what_a_worker_holds_and_the_ledger_does_not_know_is_ended() -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    stray = Held("t", "stray", 0, 1, 77, "running")
    drive.send("w0", Renew(worker.session, 1, held=[stray, Held("t", "over", 0, 1, 78, "exited")]))
    drive.tick()
    assert [(end.job, end.fence, end.why) for frame in drive.wanted for end in frame.end] == [
        ("stray", 77, "unknown to the ledger")
    ]
    drive.send(
        "w0",
        Renew(
            worker.session, 2, held=[Held("t", "x", 0, 2**70, 2**70, "running"), Held("t", "x", -1, 1, 1, "running")]
        ),
    )
    drive.tick()
    assert not drive.wanted


# ----------------------------------------------------------------------------------------------------------- reports


def test_report_frames_doubled_lost_and_out_of_order() -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    drive.submit("j", gpu={}, retries=5)
    frames = {
        1: ReportFrame(worker.session, 1, [report_of(drive, "claimed", "j")]),
        2: ReportFrame(worker.session, 2, [report_of(drive, "started", "j")]),
        3: ReportFrame(
            worker.session, 3, [report_of(drive, "exited", "j", code=1, detail="exit"), report_of(drive, "freed", "j")]
        ),
    }
    told = []
    for no in (2, 1, 1, 3, 2, 1, 3, 3):
        reply = drive.send("w0", frames[no])
        drive.tick()
        answer = drive.answers[reply]
        told.append(answer.get("no", answer.get("allowed")))
    assert told == ["1", 1, 1, "2", 2, 2, 3, 3]
    assert drive.replica("j").retries == 1
    for no in (3, 2, 1):
        drive.send("w0", frames[no])
    drive.tick()
    assert drive.replica("j").retries == 1


def test_several_frames_in_one_record_and_the_gap_says_what_is_next() -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    drive.submit("j", gpu={})
    frames = [
        ReportFrame(worker.session, 1, [report_of(drive, "claimed", "j")]),
        ReportFrame(worker.session, 3, [report_of(drive, "exited", "j")]),
        ReportFrame(worker.session, 2, [report_of(drive, "started", "j")]),
    ]
    replies = [drive.send("w0", frame) for frame in frames]
    drive.tick()
    answers = [drive.answers[reply] for reply in replies]
    assert [answer["kind"] for answer in answers] == ["recorded", "error", "recorded"]
    assert (answers[1]["code"], answers[1]["found"], answers[1]["allowed"]) == ("gap", "3", "2")
    assert drive.states("j") == ["RUNNING"]


@pytest.mark.parametrize("no", [0, -1, 2**70])
def test_monstrous_numbers_of_frames(no: int) -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    reply = drive.send("w0", ReportFrame(worker.session, no, []))
    drive.tick()
    assert drive.answers[reply]["kind"] == ("recorded" if no <= 0 else "error")
    assert drive.state.workers["w0"].no == 0


@pytest.mark.parametrize("verb", ["renew", "facts", "goodbye"])
@pytest.mark.parametrize("whose", ["nobody", "old", "empty", "other"])
def test_a_session_that_is_over_is_told_so(verb: str, whose: str) -> None:
    drive = Driving()
    worker, other = drive.worker("w0", auto=False), drive.worker("w1", auto=False)
    old = worker.session
    drive.join(worker)
    session = {"nobody": "f" * 32, "old": old, "empty": "", "other": other.session}[whose]
    frame = {"renew": Renew(session, 1), "facts": ReportFrame(session, 1, []), "goodbye": Goodbye(session)}[verb]
    assert isinstance(frame, Renew | ReportFrame | Goodbye)
    for name in ("w0", "unknown"):
        reply = drive.send(name, frame)
        drive.tick()
        assert drive.answers[reply]["code"] == "session-over"


def test_an_empty_session_is_nobodys_even_where_none_stands() -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    drive.send("w0", Goodbye(worker.session))
    drive.tick()
    for frame in (Renew("", 1), ReportFrame("", 1, []), Goodbye("")):
        reply = drive.send("w0", frame)
        drive.tick()
        assert drive.answers[reply]["code"] == "session-over"


# -------------------------------------------------------------------------------------------------------- renewals


def test_a_renewal_alone_is_in_no_record_and_is_answered_after_one() -> None:
    drive = Driving()
    worker = drive.worker("w0")
    before = drive.state.digest
    reply = drive.send("w0", worker.renew_frame())
    assert not drive.engine.urgent
    assert drive.engine.waiting == 1
    drive.tick()
    answer = {"kind": "renewed", "n": 1, "reign": 1, "v": 1, "draining": False, "drain_s": None, "sets": []}
    assert drive.answers[reply] == answer
    assert drive.state.digest == before
    assert decode_record(drive.records[-1]).steps == []


def test_a_renewal_shows_what_must_be_said_again() -> None:
    drive = Driving()
    worker = drive.worker("w0", 3, auto=False)
    for name in ("lost", "claimed", "runs"):
        drive.submit(name, gpu={})
    drive.reports([("claimed", "runs", 0, 0, ""), ("started", "runs", 0, 0, "")])
    drive.cancel("runs")
    drive.send(
        "w0",
        Renew(worker.session, 1, no=worker.no, held=[held(drive, "claimed", phase="claimed"), held(drive, "runs")]),
    )
    drive.tick()
    assert [place.job for frame in drive.wanted for place in frame.place] == ["lost"]
    assert [end.job for frame in drive.wanted for end in frame.end] == ["runs"]
    drive.send("w0", Renew(worker.session, 2, no=worker.no, held=[held(drive, "runs", phase="ending")]))
    drive.tick()
    assert not any(frame.end for frame in drive.wanted), "it is at it"


def test_an_attempt_missing_from_renewals_must_be_accounted_for() -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    drive.submit("j", gpu={})
    drive.reports([("claimed", "j", 0, 0, ""), ("started", "j", 0, 0, "")])
    for number in range(1, 4):
        assert not any(frame.end for frame in drive.wanted)
        drive.send("w0", Renew(worker.session, number, no=worker.no))
        drive.tick()
    assert [end.job for frame in drive.wanted for end in frame.end] == ["j"]
    drive.report("withdrawn", "j")
    drive.tick()
    assert drive.states("j") == ["PLACED"]
    assert drive.replica("j").losses == 1


def test_a_renewal_older_than_its_reports_proves_nothing_missing() -> None:
    drive = Driving()
    worker = drive.worker("w0", auto=False)
    drive.submit("j", gpu={})
    drive.reports([("claimed", "j", 0, 0, "")])
    for number in range(1, 9):
        drive.send("w0", Renew(worker.session, number, no=worker.no - 1))
        drive.tick()
    assert not any(frame.end for frame in drive.wanted)


@pytest.mark.parametrize("config", [Config(), msgspec.structs.replace(Config(), **CLUSTER_DEFAULTS)])
def test_loss_is_lease_and_grace_and_margin_after_the_last_answer(config: Config) -> None:
    drive = Driving.with_hosts(1, config=config)
    drive.renew()
    silence = int((config.lease_s + config.grace_s + config.margin_s) * 1000)
    drive.pass_time(silence - 100, renew=False, step=500)
    assert drive.state.workers["w0"].session
    drive.pass_time(1_500, renew=False, step=500)
    assert not drive.state.workers["w0"].session
    gone = [act for payload in drive.records for act in decode_record(payload).acts if isinstance(act, Gone)]
    assert gone == [Gone(0, "lost")]


def test_a_new_leader_counts_from_its_own_beginning() -> None:
    drive = Driving.with_hosts(1)
    drive.pass_time(25_000, renew=False)
    drive.lead()
    drive.pass_time(27_000, renew=False)
    assert drive.state.workers["w0"].session
    drive.pass_time(3_000, renew=False)
    assert not drive.state.workers["w0"].session


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize(("told_s", "own_s"), [(60.0, 20.0), (20.0, 60.0)])
def test_a_worker_is_lost_once_the_lease_that_it_was_told_is_over_too(
    told_s: float, own_s: float, snapshot: bool
) -> None:
    """The numbers are settings of each scheduler, and those of a session are of the one that it joined."""
    drive = Driving.with_hosts(1, config=Config(lease_s=told_s))
    if snapshot:
        drive.take_snapshot()
    drive.config = Config(lease_s=own_s)
    drive.lead()
    drive.pass_time(67_000, renew=False)
    assert drive.state.workers["w0"].session
    drive.pass_time(3_000, renew=False)
    assert not drive.state.workers["w0"].session


def test_a_repeated_join_is_told_no_other_lease_than_its_session_has() -> None:
    drive = Driving()
    worker = drive.worker("w0")
    drive.config = Config(lease_s=60)
    drive.lead()
    again = Join(worker.machine, worker.boot, worker.n, worker.hello)
    assert drive.join(worker, again)["code"] == "stale-join"
    assert drive.join(worker, msgspec.structs.replace(again, n=worker.n + 1))["lease_s"] == 60
    drive.config = Config()
    drive.lead()
    drive.pass_time(67_000, renew=False)
    assert drive.state.workers["w0"].session


def test_a_restored_ledger_waits_for_the_longest_lease_that_it_knows_of() -> None:
    drive = Driving.with_hosts(1, config=Config(lease_s=60))
    state = drive.state
    state.restored_ms, state.restored_epoch = state.time_ms, state.epoch - 1
    trust = StaleLedgerGuard(state, drive.engine.sessions, Config(), 0)
    assert [trust.may_place(state.time_ms, ms) for ms in (30_000, 67_000, 68_000)] == [False, False, True]


@pytest.mark.parametrize(
    ("asked_s", "given_s"), [(0, 20.0), (5.0, 20.0), (20.0, 20.0), (60.0, 60.0), (600.0, 600.0), (3600.0, 600.0)]
)
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_worker_has_the_lease_that_it_asks_for_within_the_schedulers_bounds(
    asked_s: float, given_s: float, snapshot: bool
) -> None:
    """And its jobs begin elsewhere only once that lease, the grace and the margin are over; under a new leader, too."""
    drive = Driving(Config(lease_most=600.0))
    far = drive.worker("far", lease_s=asked_s)
    drive.submit("a")
    drive.settle()
    drive.worker("near")
    again = Join(far.machine, far.boot, far.n, far.hello)
    assert drive.join(far, again)["lease_s"] == given_s
    if snapshot:
        drive.take_snapshot()
        drive.config = Config()
        drive.lead()
    lost_ms = int(given_s * 1000) + 5_000 + 3_000

    def pass_time(ms: int) -> None:
        for _ in range(ms // 1_000):
            drive.send("near", Renew(drive.workers["near"].session, drive.now))
            drive.tick(1_000)

    pass_time(lost_ms - 2_000)
    assert [at.worker.id for at in drive.job("a").attempts] == ["far"]
    pass_time(4_000)
    assert [at.worker.id for at in drive.job("a").attempts] == ["near"]


def test_a_silent_worker_with_a_long_lease_gets_no_jobs() -> None:
    drive = Driving.with_hosts(1, config=Config(lease_most=600.0), lease_s=600.0)
    drive.renew()
    drive.pass_time(15_000, renew=False)
    drive.submit("a")
    drive.settle()
    assert drive.states("a") == ["QUEUED"]


def test_a_restored_ledger_waits_for_the_longest_lease_that_a_worker_may_have() -> None:
    """One that joined after the backup is in no row of it."""
    drive = Driving.with_hosts(1)
    state = drive.state
    state.restored_ms, state.restored_epoch = state.time_ms, state.epoch - 1
    trust = StaleLedgerGuard(state, drive.engine.sessions, Config(lease_most=60.0), 0)
    assert [trust.may_place(state.time_ms, ms) for ms in (30_000, 67_000, 68_000)] == [False, False, True]


def test_the_longest_lease_is_no_shorter_than_the_usual_one() -> None:
    with pytest.raises(ValueError, match="lease_most must be at least lease_s"):
        Config(lease_s=30.0, lease_most=20.0)


@pytest.mark.parametrize(("lease", "good"), [(20.0, True), (9.0, False), (10.0, False), (10.1, True)])
def test_a_lease_must_outlive_a_takeover(lease: float, good: bool) -> None:
    if good:
        Config(lease_s=lease)
    else:
        with pytest.raises(ValueError, match="lease_s must be above 10"):
            Config(lease_s=lease)


def test_a_shared_device_that_is_well_again_takes_sharers_again() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("a", gpu={"sharing": "mps"})
    drive.settle()
    drive.load("w0", s0="ecc")
    drive.submit("b", gpu={"sharing": "mps"})
    assert drive.states("b") == ["QUEUED"]
    drive.load("w0")
    drive.tick()
    assert drive.states("b") == ["PLACED"]


def test_a_refused_sharer_does_not_close_the_device_for_ever() -> None:
    drive = Driving.with_hosts(1, auto=False)
    drive.submit("a", gpu={"sharing": "mps"})
    drive.submit("b", gpu={"sharing": "mps"})
    drive.report("claimed", "a")
    drive.report("refused", "b")
    drive.submit("c", gpu={"sharing": "mps"})
    assert drive.states("c") == ["QUEUED"], "busy until a renewal says which slots really are"
    drive.renew("w0")
    assert drive.states("c") == ["PLACED"]


def test_a_load_frame_of_another_boot_says_nothing() -> None:
    drive = Driving()
    worker = drive.worker("w0", 1)
    worker.boot = "older"
    drive.load("w0", s0="ecc")
    drive.submit("j", gpu={})
    assert drive.states("j") == ["PLACED"]


def test_attempts_of_one_worker_are_bounded() -> None:
    from moorage.scheduler.core.fleet.host import ATTEMPTS_MAX

    drive = Driving()
    drive.checks = False
    drive.worker("w0", 0)
    for index in range(5):
        drive.offer_submit(f"j{index}", replicas=1024)
    while drive.engine.urgent:
        drive.tick(obey=False)
    assert len(drive.state.workers["w0"].attempts) == ATTEMPTS_MAX
    drive.pass_time(30_000, renew=False)
    drive.check()
    assert not drive.state.workers["w0"].session


# -------------------------------------------------------------------------------------------------------- releases


def of_release(drive: Driving, release: str) -> Worker:
    worker = drive.worker("w0", auto=False)
    worker.hello = msgspec.structs.replace(worker.hello, release=release)
    return worker


@pytest.mark.parametrize("release", ["", "0.4.0", "0.5.9", "0.6.0rc1"])
def test_a_worker_of_a_neighbouring_release_joins(release: str) -> None:
    drive = Driving()
    drive.engine.sessions.release = "0.5.0"
    worker = of_release(drive, release)
    worker.n = 5
    assert drive.join(worker)["kind"] == "joined"
    assert drive.renew("w0")[0]["kind"] == "renewed"


@pytest.mark.parametrize(
    ("release", "code"),
    [("0.3.9", "release-apart"), ("0.7.0", "release-apart"), ("1.0.0", "release-apart"), ("?", "invalid-argument")],
)
def test_a_worker_too_far_away_is_refused_and_changes_nothing(release: str, code: str) -> None:
    drive = Driving()
    drive.engine.sessions.release = "0.5.0"
    worker = of_release(drive, release)
    before = (worker.session, drive.state.digest)
    answer = drive.join(worker, Join(worker.machine, worker.boot, 9, worker.hello))
    assert (answer["kind"], answer["code"], answer["found"]) == ("error", code, release)
    assert (drive.state.workers["w0"].session, drive.state.digest) == before


def test_the_lease_of_a_worker_that_a_new_scheduler_cannot_speak_to_runs_out() -> None:
    drive = Driving()
    worker = of_release(drive, "0.2.0")
    worker.n = 5
    drive.join(worker)
    drive.submit("j", gpu={})
    drive.report("claimed", "j")
    drive.report("started", "j")
    drive.lead()
    drive.engine.sessions.release = "0.9.0"
    answer = drive.renew("w0")[0]
    assert (answer["code"], answer["found"], answer["allowed"]) == ("release-apart", "0.2.0", "0.8 to 0.10")
    drive.submit("late", gpu={})
    assert drive.states("late") == ["QUEUED"]
    drive.pass_time(30_000)
    assert drive.state.workers["w0"].session == ""
    assert drive.states("j") == ["QUEUED"]


def test_a_worker_that_holds_what_another_ledger_gave_it_does_not_join_and_is_given_nothing() -> None:
    """It refused the answer to each join, stood as `up` meanwhile, and every job that came to it was lost."""
    drive = Driving()
    worker = drive.worker("w0", 2, auto=False)
    drive.submit("j", gpu={})
    drive.report("claimed", "j")
    held = [Held("t", "j", 0, 1, 7, "running")]
    drive.pass_time(drive.engine.config.lost_ms + 2_000, renew=False)
    assert not drive.state.workers["w0"].session
    answer = drive.join(worker, msgspec.structs.replace(worker.join_frame(), ledger="ledger-0", holding=held))
    assert (answer["code"], answer["found"]) == ("failed-precondition", "ledger-0")
    assert "moorage admin restore" in answer["next"]
    assert not drive.state.workers["w0"].session
    drive.submit("next", gpu={})
    assert drive.states("next") == ["QUEUED"]
    assert drive.join(worker, msgspec.structs.replace(worker.join_frame(), ledger="ledger-0"))["kind"] == "joined"


def test_a_worker_that_was_away_through_several_restores_joins() -> None:
    drive = Driving()
    drive.state.former_id = "ledger-3 ledger-2 ledger-0"
    assert drive.state.former_of("ledger-0") == "ledger-0", "so it is told that this one was restored from its own"
    assert drive.state.former_of("foreign") == drive.state.former_of("") == "ledger-3"
    assert [drive.state.follows(name) for name in ("ledger-2", "ledger-1", "")] == [True, False, False]


# ----------------------------------------------------------------------------------------------- what could be heard


def test_time_in_which_no_worker_could_be_heard_runs_out_no_lease() -> None:
    drive = Driving.with_hosts(1)
    lost_ms = drive.engine.config.lost_ms
    drive.pass_time(lost_ms - 1000, renew=False)
    drive.engine.unheard(lost_ms // 2, drive.now)
    drive.pass_time(lost_ms // 2, renew=False)
    assert drive.state.workers["w0"].session, "it was heard last in the first half of what counts"
    drive.pass_time(3000, renew=False)
    assert not drive.state.workers["w0"].session, "silent for all of its time, in which it could be heard"


def test_a_worker_is_never_heard_from_in_the_future() -> None:
    drive = Driving.with_hosts(1)
    drive.engine.unheard(100 * drive.engine.config.lost_ms, drive.now)
    drive.pass_time(drive.engine.config.lost_ms + 2000, renew=False)
    assert not drive.state.workers["w0"].session


def test_a_renewal_that_waits_for_the_next_record_keeps_its_lease() -> None:
    """A record takes a bounded number of frames, and a leader that is behind has read more."""
    drive = Driving.with_hosts(1, 1)
    drive.state.ceilings = replace(CEILINGS, events=1)
    drive.pass_time(drive.engine.config.lost_ms - 500, renew=False)
    for name, worker in drive.workers.items():
        drive.send(name, worker.renew_frame())
    drive.tick(1000)
    assert [worker.session != "" for worker in drive.state.workers.values()] == [True, True]
    drive.pass_time(drive.engine.config.lost_ms, renew=False)
    for _ in range(4):  # of a session that is over, and each waits for a record of its own
        drive.send("w1", Renew("another session", 1))
    drive.pass_time(3000, renew=False)
    assert not drive.state.workers["w1"].session
