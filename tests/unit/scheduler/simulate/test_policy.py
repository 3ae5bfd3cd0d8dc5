"""Rules on waits are tried on copies of a trace; what breaks one is told by a small part of the trace."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from moorage.cli.main import main
from moorage.schemas.errors import Refused
from moorage.testing.simulate.policy import SHRUNK_JOBS, Judged, Rule, judge, read_rules, shrunk
from moorage.testing.simulate.shaken import copies, waits_of
from tests.unit.scheduler.simulate.test_shaken import HOUR_MS, as_trace, busy, job


def test_a_rule_is_broken_by_what_is_above_its_bounds() -> None:
    rule = Rule(mean_wait_s=5.5, p50_wait_s=5, p90_wait_s=9, max_wait_s=9)
    waits = [number * 1000 for number in range(1, 11)]  # mean 5.5, p50 5, p90 9, max 10
    assert rule.broken_by(waits) == {"max_wait_s": 10.0}
    assert Rule(p50_wait_s=4.9, p90_wait_s=8.9).broken_by(waits) == {"p50_wait_s": 5.0, "p90_wait_s": 9.0}
    assert Rule(max_wait_s=0).broken_by([]) == {}
    assert [Judged(rule="", jobs=1, copies=of, broken=broken).fails for of, broken in
            ((5, 4), (5, 3), (1, 1), (1, 0), (2, 1))] == [True, False, True, False, True]  # fmt: skip


def test_a_rule_chooses_jobs_by_tenant_and_workload_and_is_judged_in_each_copy() -> None:
    side = busy()
    of_b, of_a, none = judge(
        [Rule(tenant="b", max_wait_s=0), Rule(tenant="a", max_wait_s=8.9 * 3600), Rule(workload="x", max_wait_s=0)],
        side, 3,
    )  # fmt: skip
    assert (of_b.jobs, of_b.broken, of_b.fails) == (1, 0, False)
    assert (of_a.jobs, none.jobs, none.fails) == (10, 0, False)
    # the last of ten waits nine hours, less the nine minutes by which it came later, give or take two in a copy
    assert of_a.broken == 0
    (broken,) = judge([Rule(tenant="a", max_wait_s=8 * 3600)], side, 3)
    assert (broken.broken, broken.copy, broken.fails) == (3, 0, True)
    assert broken.by == {"max_wait_s": pytest.approx(9 * 3600 - 9 * 60)}


def test_a_counter_example_is_a_small_part_that_breaks_the_rule_too() -> None:
    side = busy()
    more = [job(f"idle-{number}", 30 * HOUR_MS + number, 1_000, "c", gpu={"count": 1}) for number in range(150)]
    side = side._replace(jobs=[*side.jobs, *more])
    rule = Rule(max_wait_s=1.5 * 3600)
    jobs, events = shrunk(rule, side, 0)
    assert len(jobs) <= SHRUNK_JOBS
    assert {each.tenant for each in jobs} == {"a"}
    assert len(jobs) == 3, "the third of three waits two hours, less two minutes"
    waits = waits_of(side, jobs, events, None)
    assert rule.broken_by(list(waits.values()))
    assert [event.kind for event in events] == ["join", "join", "order"]
    assert copies(side, 0)[0] == side.jobs


@pytest.mark.parametrize(
    "text",
    ["", "rule = 3", "[[rule]]\n", '[[rule]]\ntenant = "a"\n', "[[rule]]\np90_wait_s = -1\n", "[[rule", "rule = []",
     "[[rule]]\np95_wait_s = 1\n"],
)  # fmt: skip
def test_a_rule_that_says_nothing_is_refused_by_its_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(Refused, match=r"r\.toml"):
        read_rules(tmp_path / "r.toml")


def test_the_command_ends_with_1_and_writes_the_counter_example_which_breaks_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, rules, small = tmp_path / "t.jsonl", tmp_path / "r.toml", tmp_path / "small.jsonl"
    trace.write_bytes(as_trace(busy()))
    rules.write_text('[[rule]]\ntenant = "b"\nmax_wait_s = 0\n[[rule]]\np90_wait_s = 3600\n')

    def told(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["policy", "test", str(rules), *argv])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    code, out, err = told("--trace", str(trace), "--copies", "3", "--counter-example", str(small))
    assert code == 1, err
    assert re.search(r"tenant b: max_wait_s 0\s+kept\s+1\s+0 of 3", out), out
    assert re.search(r"all: p90_wait_s 3600\s+broken\s+11\s+3 of 3", out), out
    found = re.search(r"small\.jsonl: (\d+) of 11 jobs break all: p90_wait_s 3600, too", err)
    assert found is not None
    code, out, _ = told("--trace", str(small), "--copies", "1", "--json")
    rows = [msgspec.json.decode(line) for line in out.splitlines()]
    assert (code, [row["fails"] for row in rows]) == (1, [False, True])
    assert rows[1]["jobs"] == int(found[1])
    rules.write_text("[[rule]]\nmax_wait_s = 36000\n")
    assert told("--trace", str(trace), "--copies", "3")[0] == 0
    for wrong in (["--trace", str(rules)], ["--trace", str(trace), "--copies", "0"], ["--trace", str(tmp_path / "no")],
                  ["--trace", str(trace), "--set", "reserve_after=1,2"]):  # fmt: skip
        assert told(*wrong)[0] == 2, wrong
