"""The rules of `deploy/prometheus/alerts.yml` by Prometheus's own promtool: each fires by its trouble and by no other,
once with one exporter and with two, and fires a week later if the trouble is still there.

`tests/system/deploy/build promtool` brings it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

from tests.system.deploy.parts import parts, why_no_parts
from tests.unit.docs.markdown import DOCS

RULES: Final = DOCS.parent / "deploy" / "prometheus" / "alerts.yml"
WEEK_M: Final = 7 * 24 * 60
#: a week after the trouble began, at which the rules are read
LATE_M: Final = WEEK_M + 90
DAY_S: Final = 86_400
#: values of a series in all, one a minute
WHOLE: Final = 10_199
RARER_M: Final = 3
Series = dict[str, str]


class Case(NamedTuple):
    """Series of one exporter, in promtool's notation, a value a minute. The trouble begins after an hour; it fires
    `after_m` minutes later, and not yet `before_m` minutes later."""

    trouble: Series
    sound: Series
    after_m: int
    before_m: int = 0
    alerts: int = 1


def kept(value: float) -> str:
    return f"{value:g}x{WHOLE}"


def then(before: float, value: float) -> str:
    """A value for an hour, then another one."""
    return f"{before:g}x59 {value:g}x{WHOLE}"


UP: Final = {"moorage_up": kept(1), 'up{job="moorage"}': kept(1)}
CASES: Final[dict[str, Case]] = {
    "MoorageNoLeader": Case({"moorage_up": then(1, 0)}, {"moorage_up": kept(1)}, 3),
    "MoorageTakeovers": Case({"moorage_epoch": f"1x59 1+1x{WHOLE}"}, {"moorage_epoch": f"1x59 4x{WHOLE}"}, 10),
    "MoorageLedgerCopyLost": Case(
        {"moorage_ledger_copies_lacking": then(0, 1)}, {"moorage_ledger_copies_lacking": kept(0)}, 3
    ),
    "MoorageNoStandby": Case({"moorage_standbys": then(1, 0)}, {"moorage_standbys": kept(0)}, 10, before_m=3),
    "MoorageFailures": Case(
        {'moorage_failures_total{what="submit"}': then(0, 2)}, {'moorage_failures_total{what="submit"}': kept(0)}, 2
    ),
    "MoorageDeadLetters": Case(
        {'moorage_dead_letters{tenant="t"}': then(0, 2)}, {'moorage_dead_letters{tenant="t"}': kept(0)}, 2
    ),
    "MoorageHistoryGap": Case(
        {"moorage_follower_gap_records": then(5, 7)}, {"moorage_follower_gap_records": then(5, 0)}, 2
    ),
    "MoorageQueueFills": Case(
        {"moorage_request_queue_bytes": then(1, 81), "moorage_request_queue_bytes_max": kept(100)},
        {"moorage_request_queue_bytes": then(1, 79), "moorage_request_queue_bytes_max": kept(100)},
        3,
    ),
    "MoorageWorkerLost": Case(
        {'moorage_worker_not_heard{worker="n1"}': then(0, 1), 'moorage_worker_not_heard{worker="n2"}': then(0, 1)},
        {'moorage_worker_not_heard{worker="n1"}': kept(0)},
        5,
        before_m=1,
        alerts=2,
    ),
    "MoorageGpuOut": Case(
        {'moorage_gpus{state="sick"}': then(0, 1)}, {'moorage_gpus{state="leased"}': kept(8)}, 40, before_m=20
    ),
    "MoorageIdleBesideQueue": Case(
        {'moorage_waiting_replicas{reason="share"}': then(0, 4), 'moorage_gpus{state="free"}': kept(2)},
        {'moorage_waiting_replicas{reason="held"}': kept(4), 'moorage_gpus{state="free"}': kept(2)},
        70,
        before_m=50,
    ),
    "MoorageServiceFails": Case(
        {
            'moorage_service_errors_total{tenant="t",service="s",code="500"}': f"0x59 0+10x{WHOLE}",
            'moorage_service_calls_total{tenant="t",service="s"}': f"0+100x{WHOLE}",
        },
        {
            'moorage_service_errors_total{tenant="t",service="s",code="404"}': f"0x59 0+10x{WHOLE}",
            'moorage_service_errors_total{tenant="t",service="s",code="500"}': f"0x59 0+4x{WHOLE}",
            'moorage_service_calls_total{tenant="t",service="s"}': f"0+100x{WHOLE}",
        },
        20,
    ),
    "MoorageServiceFull": Case(
        {'moorage_service_refused_total{tenant="t",service="s"}': f"0x59 0+1x{WHOLE}"},
        {'moorage_service_refused_total{tenant="t",service="s"}': kept(9)},
        15,
    ),
    "MoorageNoBackup": Case(
        {"moorage_backup_timestamp_seconds": kept(3600 - 2 * DAY_S)},
        {"moorage_backup_timestamp_seconds": kept(8 * DAY_S)},
        70,
        before_m=50,
    ),
    "MoorageNoRestoreDrill": Case(
        {"moorage_restore_drill_timestamp_seconds": kept(3600 - 100 * DAY_S)},
        {"moorage_restore_drill_timestamp_seconds": kept(-80 * DAY_S)},
        70,
        before_m=50,
    ),
    "MoorageCertificateEnds": Case(
        {'moorage_certificate_end_timestamp_seconds{certificate="h1:4222"}': kept(30 * DAY_S + 3600)},
        {'moorage_certificate_end_timestamp_seconds{certificate="h1:4222"}': kept(60 * DAY_S)},
        20,
        before_m=5,
    ),
}


def of_exporter(series: Series, instance: str) -> list[dict[str, str]]:
    """The series as they come from one of the hosts that serve the metrics of one fleet."""
    found = []
    for name, values in {**UP, **series}.items():
        head, brace, labels = name.partition("{")
        inner = f"{labels.rstrip('}')}," if brace else ""
        found.append({"series": f'{head}{{{inner}instance="{instance}"}}', "values": values})
    return found


def group(name: str, inputs: list[dict[str, str]], expected: dict[int, int], step_m: int = 1) -> dict[str, Any]:
    """One test of promtool: so many alerts of this name fire at each of these minutes."""
    fires = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
    told = [
        {
            "expr": fires,
            "eval_time": f"{at_m}m",
            "exp_samples": [{"labels": "{}", "value": count}] if count else [],
        }
        for at_m, count in expected.items()
    ]
    return {"interval": f"{step_m}m", "input_series": inputs, "promql_expr_test": told}


def check(folder: Path, groups: list[dict[str, Any]], every_m: int = 1) -> str:
    """What promtool says of these tests, with rules that are read every so many minutes; "" if all hold."""
    tested = {each["promql_expr_test"][0]["expr"].split('"')[1] for each in groups}
    rules = yaml.safe_load(RULES.read_text())
    for each in rules["groups"]:
        each["rules"] = [rule for rule in each["rules"] if rule["alert"] in tested]
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    made = {"rule_files": ["rules.yml"], "evaluation_interval": f"{every_m}m", "tests": groups}
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump(made, sort_keys=False))
    done = subprocess.run([parts() / "promtool", "test", "rules", str(file)], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def holds(folder: Path, expected: dict[int, int], *tests: tuple[str, list[dict[str, str]]]) -> None:
    """As often as this, these fire by these series: soon, and after a week, for which the rules are read less often."""
    soon = {at_m: count for at_m, count in expected.items() if at_m < WEEK_M}
    late = {at_m: count for at_m, count in expected.items() if at_m >= WEEK_M}
    assert check(folder, [group(name, inputs, soon) for name, inputs in tests]) == ""
    assert check(folder, [group(name, rarer(inputs), late, RARER_M) for name, inputs in tests], every_m=30) == ""


def rarer(inputs: list[dict[str, str]]) -> list[dict[str, str]]:
    """The series with a value each RARER_M minutes: promtool lets a query read 10,000 values."""
    steps = {each: f"x{(int(each[1:]) + 1) // RARER_M - 1}" for each in ("x59", f"x{WHOLE}")}
    return [{**each, "values": re.sub(r"x\d+", lambda found: steps[found[0]], each["values"])} for each in inputs]


def needs_promtool() -> None:
    if why := why_no_parts("promtool"):
        pytest.skip(why)


def test_each_rule_has_a_case_here() -> None:
    rules = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert sorted([*CASES, "MoorageMetricsAway"]) == sorted(rules)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_by_its_trouble_alone_and_a_week_later_still(name: str, tmp_path: Path) -> None:
    needs_promtool()
    case = CASES[name]
    one = of_exporter(case.trouble, "h1")
    fires = {
        30: 0,
        **({60 + case.before_m: 0} if case.before_m else {}),
        60 + case.after_m: case.alerts,
        LATE_M: case.alerts,
    }
    holds(tmp_path, fires, (name, one), (name, one + of_exporter(case.trouble, "h2")))
    # with no exporter at all nothing is known, and no rule but one claims to know
    ended = {key: re.sub(r"x\d+.*", "x59 stale", values) for key, values in case.trouble.items()}
    gone = of_exporter({**dict.fromkeys(UP, "1x59 stale"), **ended}, "h1")
    quiet = dict.fromkeys((30, 60 + case.after_m + 20, LATE_M), 0)
    holds(tmp_path, quiet, (name, of_exporter(case.sound, "h1")), (name, gone))


@pytest.mark.slow
def test_an_exporter_that_is_away_is_an_alert_of_its_own_and_no_other(tmp_path: Path) -> None:
    """It paged "no scheduler leads, all jobs end" when only the exporter was away."""
    needs_promtool()
    name = "MoorageMetricsAway"
    one = of_exporter({"moorage_up": "1x59 stale", 'up{job="moorage"}': then(1, 0)}, "h1")
    unknown = of_exporter(dict.fromkeys(UP, "1x59 stale"), "h1")
    fires = {30: 0, 62: 0, 70: 1, LATE_M: 1}
    holds(tmp_path, fires, (name, one), (name, one + of_exporter({}, "h2")), (name, unknown))
    quiet = dict.fromkeys((30, 70, LATE_M), 0)
    holds(tmp_path, quiet, ("MoorageNoLeader", one), (name, of_exporter({"moorage_up": then(1, 0)}, "h1")))
