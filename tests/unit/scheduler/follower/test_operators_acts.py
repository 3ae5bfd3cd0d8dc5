"""The orders of operators that a follower of the ledger knows: each once, by whom, about what, and why."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.events import Execute, Order
from moorage.scheduler.core.ledger.acts.job import OfJob
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.follower import operators_acts
from moorage.scheduler.follower.operators_acts import OperatorsActs
from moorage.schemas.answers.operators import ActRow
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.errors import Problem
from moorage.schemas.frames import ExecAsked, Goodbye, Unwell
from moorage.schemas.operate import act_of
from tests.unit.scheduler.driving import Driving

HOUR_MS = 3_600_000


def row_of(verb: str, at_ms: int, what: str) -> ActRow:
    return ActRow(seq=1, at_ms=at_ms, by="tenant:t/omar" if verb == "logs" else "operator:ana", verb=verb, what=what)


class Ordering(Driving):
    """Orders of operators, and what a follower that reads the ledger knows of them."""

    def said(self, verb: str, operator: str = "ana", /, **words: Any) -> None:
        self.engine.offer(Order(verb, act_of(verb, {"by": "me", **words}), "r", True, {"me": 9}, operator))
        self.tick()
        assert "code" not in self.answers["r"], self.answers["r"]

    def table(self) -> OperatorsActs:
        """What one reads that had to begin again halfway from its save."""
        state, made = State(), OperatorsActs()
        for seq, payload in enumerate(self.records, 1):
            record = decode_record(payload)
            made.fold(state, record, fold(state, record, seq))
            if seq == len(self.records) // 2:
                made = OperatorsActs.load(made.dump())
        return made

    def asked(self, **arguments: Any) -> dict[str, Any]:
        answer = self.table().answer(arguments, self.state.time_ms)
        assert not isinstance(answer, Problem)
        return answer

    def told(self, **arguments: Any) -> list[str]:
        words = ("verb", "tenant", "job", "worker", "what", "why")
        return [" ".join(row[word] for word in words if word in row) for row in self.asked(**arguments)["acts"]]


def test_each_order_is_listed_with_what_it_is_about_and_nobody_elses_acts() -> None:
    drive = Ordering()
    worker = drive.worker("w0", 4, capabilities={"noop": Capabilities(freezes=True)})
    drive.submit("j", replicas=2, gpu={})
    drive.settle()
    drive.said("hold", tenant="t", job="j", why="look")
    drive.said("release", tenant="t", job="j")
    drive.said("hold", tenant="u")
    drive.said("priority", tenant="t", job="j", priority=70)
    drive.said("freeze", tenant="t", job="j")
    drive.said("resume", tenant="t", job="j")
    drive.said("limit", tenant="u", gpus=4)
    drive.said("share", tenant="u", weight=2, gpus=1)
    drive.said("requeue", tenant="t", job="j", why="stuck")
    drive.cancel("j")
    drive.settle()
    worker.unwell = [Unwell(1, "xid", "Xid 79", False)]
    drive.renew("w0")
    drive.said("release", worker="w0", slots=[1])
    assert drive.told() == [
        "hold t j look", "release t j", "hold u", "priority t j 70", "freeze t j", "resume t j",
        "limit u 4 GPUs, no limit of jobs", "share u weight 2, 1 GPU guaranteed", "requeue t j 2 replicas stuck",
        f"release w0 {worker.hello.gpu_pool[1].uuid}",
    ]  # fmt: skip


def test_an_order_to_place_a_job_is_listed_with_its_worker() -> None:
    drive = Ordering()
    drive.worker("w0", 4)
    drive.said("cordon", worker="w0")
    drive.submit("j", replicas=2, gpu={})
    drive.said("place", tenant="t", job="j", on="w0")
    drive.settle()
    drive.said("requeue", tenant="t", job="j", why="stuck")
    assert drive.told() == ["cordon w0", "place t j 2 replicas on w0", "requeue t j 2 replicas stuck"]
    assert [row["by"] for row in drive.asked(verb="place")["acts"]] == ["operator:ana"]


def test_a_drain_is_one_order_and_what_its_window_does_none() -> None:
    drive = Ordering()
    drive.worker("w0", 1)
    drive.said("cordon", worker="w0", why="a fan")
    drive.said("uncordon", worker="w0")
    drive.said("drain", worker="w0")
    drive.said("drain", worker="w0", within_s=60, for_s=120)
    drive.pass_time(200_000)
    assert drive.state.workers["w0"].flag == "open", "its window is over"
    drive.said("drain", worker="w0", from_s=60)
    drive.pass_time(100_000)
    assert drive.state.workers["w0"].flag == "draining", "its window has begun"
    drive.said("drain", worker="w0")
    drive.said("drain", worker="w0", from_s=3600)
    drive.said("uncordon", worker="w0")
    assert drive.told() == [
        "cordon w0 a fan", "uncordon w0", "drain w0", "drain w0", "drain w0", "drain w0", "drain w0", "uncordon w0",
    ]  # fmt: skip
    drains = [row for row in drive.asked()["acts"] if "leave_ms" in row]
    assert [row.get("until_ms", 0) - row["from_ms"] for row in drains if "until_ms" in row] == [120_000]
    assert [row["leave_ms"] - row["at_ms"] for row in drains] == [60_000, 60_000, 3_600_000]


def test_orders_are_chosen_by_time_operator_and_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators_acts, "ANSWERED_MAX", 2)
    drive = Ordering()
    drive.worker("w0", 1)
    drive.said("cordon", worker="w0")
    drive.said("uncordon", "ben", worker="w0")
    drive.pass_time(HOUR_MS)
    drive.said("cordon", "_", worker="w0")
    assert [row["by"] for row in drive.asked()["acts"]] == ["operator:ben", "operator"]
    assert drive.asked()["left_out"] == 1
    assert drive.told(since_s=60) == ["cordon w0"]
    assert drive.told(by="ana") == drive.told(by="operator:ana") == ["cordon w0"]
    assert drive.told(by="me") == ["cordon w0"], "without a key of its own, the name that it gave"
    assert drive.told(verb="uncordon") == ["uncordon w0"]


def test_all_orders_come_once_page_by_page_however_many_are_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators_acts, "ANSWERED_MAX", 3)
    made = OperatorsActs([row_of("limit", at_ms, str(n)) for n, at_ms in enumerate((5, 5, 5, 5, 7, 8, 8))])
    found, after = list[str](), "0"
    for left_out in (4, 1, 0, 0):
        answer = made.answer({"after": after}, 9)
        assert not isinstance(answer, Problem)
        found += [row["what"] for row in answer["acts"]]
        after = answer["next"]
        assert answer["left_out"] == left_out
    assert found == list("0123456")
    made.note(row_of("logs", 8, "7"))
    answer = made.answer({"after": after}, 9)
    assert not isinstance(answer, Problem)
    assert [row["what"] for row in answer["acts"]] == ["7"], "what came later, at the same moment"


def test_what_tenants_did_takes_no_place_of_orders_nor_orders_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators_acts, "ACTS_MAX", 3)
    made = OperatorsActs()
    for at in range(6):
        made.note(row_of("logs", at * operators_acts.READ_MS, f"read {at}"))
        made._add(row_of("limit", at * operators_acts.READ_MS, f"order {at}"))
    for table in (made, OperatorsActs.load(made.dump())):
        answer = table.answer({}, 0)
        assert not isinstance(answer, Problem)
        assert [row["what"] for row in answer["acts"]] == [
            f"{what} {at}" for at in (3, 4, 5) for what in ("read", "order")
        ]
        assert answer["from_ms"] == (2 if table is made else 3) * operators_acts.READ_MS


def test_many_pages_of_one_jobs_output_are_one_row() -> None:
    made = OperatorsActs()
    for at_ms in (0, 1, operators_acts.READ_MS - 1, operators_acts.READ_MS):
        made.note(row_of("logs", at_ms, ""))
    answer = made.answer({"verb": "logs"}, 0)
    assert not isinstance(answer, Problem)
    assert [row["at_ms"] for row in answer["acts"]] == [0, operators_acts.READ_MS]


def test_a_command_in_a_running_job_is_listed_with_who_ran_it() -> None:
    drive = Ordering()
    drive.worker("w0", 1, capabilities={"noop": Capabilities(execs=True)})
    drive.submit("j", gpu={})
    drive.settle()
    asked = ExecAsked(job="j", argv=["cat", "a b"])
    drive.engine.offer(Execute("t", asked, "s", "r", True, "import A U t/lena"))
    drive.tick()
    rows = [(row["verb"], row["by"], row["job"], row["what"], row["came"]) for row in drive.asked()["acts"]]
    assert rows == [("exec", "tenant:t/lena", "j", "replica 0: cat 'a b'", "import A U t/lena")]
    assert drive.told(by="t/lena", verb="exec") == ["exec t j replica 0: cat 'a b'"]


@pytest.mark.parametrize(
    "wrong",
    [{"since_s": "1h"}, {"since_s": -1}, {"by": 7}, {"verb": "fleet"}, {"verb": []}, {"after": 1}, {"after": "x"}],
)
def test_a_wrong_question_is_refused_with_its_field(wrong: dict[str, Any]) -> None:
    answer = OperatorsActs().answer(wrong, 0)
    assert isinstance(answer, Problem)
    assert answer.field == f"$.{next(iter(wrong))}"


class Requeue(OfJob, tag="requeue"):
    """An act that is named as its verb, as that of a new verb would be; requeue itself is written in steps."""


def test_an_act_that_is_named_as_its_verb_is_listed_without_a_word_of_its_own() -> None:
    drive = Driving.with_hosts(1)
    drive.submit("j", gpu={})
    act, state = Requeue(drive.job("j").num), drive.state
    assert operators_acts._verb_of(state, Folded(), act, {}) == {"verb": "requeue", "tenant": "t", "job": "j"}


def test_a_worker_that_is_forgotten_or_admitted_is_an_order_of_its_own() -> None:
    drive = Ordering()
    drive.worker("w0", 1)
    drive.send("w0", Goodbye(drive.workers.pop("w0").session))
    drive.tick()
    drive.said("forget", worker="w0", why="sold")
    drive.said("admit", "joiner", worker="spot-1", pool="spot", token="UAT6", host="vm")
    drive.pass_time(3_000)
    assert drive.told() == ["forget w0 sold", "admit spot-1 token UAT6 of pool spot, on vm"]
    assert drive.told(by="operator:joiner") == ["admit spot-1 token UAT6 of pool spot, on vm"]


def test_the_cordon_of_a_gpu_is_listed_and_what_its_worker_reports_is_not() -> None:
    drive = Ordering()
    worker = drive.worker("w0", 2)
    drive.said("cordon", worker="w0", slots=[1], why="a fan is loud")
    worker.unwell = [Unwell(0, "cordoned", "by the worker itself")]
    drive.renew()
    worker.unwell = []
    drive.renew()
    drive.said("uncordon", worker="w0", slots=[1])
    gpu = worker.hello.gpu_pool[1].uuid
    assert drive.told() == [f"cordon w0 {gpu} a fan is loud", f"uncordon w0 {gpu}"]
    assert {(row["by"], row["said"]) for row in drive.asked()["acts"]} == {("operator", "me")}
