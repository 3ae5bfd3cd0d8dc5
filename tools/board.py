"""The Grafana board of `deploy/grafana/moorage.json`: rows of panels over the metrics of `moorage metrics`.

Grafana's own builders make it, so every field is one of its schema. A panel's text is the help of the metrics in it,
looked up in the list that `metrics` makes, so a query names metrics that there are.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Final, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode, VisibilityMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef

from moorage.cli.fleet.metrics import Told, families
from moorage.schemas.answers.fleet import ContainedFailures, FleetAnswer, RequestQueueRow
from moorage.schemas.answers.operators import UsageRow, WaitRow, Waits
from moorage.schemas.frames import LedgerCopies
from moorage.schemas.operate import Limit, TenantRow

#: the variable of the board: which Prometheus is asked
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${source}")
TENANTS_SHOWN: Final = 15


class Panel(NamedTuple):
    """A panel: its title, its unit in Grafana's words, and what it asks for, each with the text of its legend.

    `stacked`: the values add up.
    """

    title: str
    unit: str
    queries: dict[str, str]
    stacked: bool = False


def _quantile(of: str, q: float, by: str) -> str:
    return f"histogram_quantile({q}, sum by (le, {by}) (rate(moorage_{of}_bucket[1h])))"


def _rate(of: str) -> str:
    return f"rate(moorage_{of}[5m])"


def _by_service(of: str, *more: str) -> str:
    return f"sum by ({', '.join(('tenant', 'service', *more))}) ({_rate(f'service_{of}')})"


def _calls_quantile(of: str) -> str:
    by = "sum by (le, tenant, service)"
    return f"histogram_quantile(0.9, {by} ({_rate(f'service_{of}_seconds_bucket')}))"


def _most(query: str) -> str:
    return f"topk({TENANTS_SHOWN}, {query})"


FAILED: Final = '{state=~"FAILED|TIMED_OUT|EXPIRED"}'
ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "GPUs": (
        Panel("GPUs by state", "short", {"sum by (state) (moorage_gpus)": "{{state}}"}, stacked=True),
        Panel(
            "Leased and free, by model",
            "short",
            {
                "moorage_model_gpus - moorage_model_free_gpus": "{{model}}, leased or out of use",
                "moorage_model_free_gpus": "{{model}}, free",
            },
            stacked=True,
        ),
        Panel(
            "Leased GPUs at work now, and idle",
            "short",
            {"moorage_model_at_work_gpus": "{{model}}, at work", "moorage_model_idle_gpus": "{{model}}, idle"},
        ),
        Panel("Largest job that fits now, in GPUs", "short", {"moorage_model_largest_fit_gpus": "{{model}}"}),
    ),
    "Waiting": (
        Panel("Wait of half of the last hour's jobs", "s", {_quantile("wait_seconds", 0.5, "gpus"): "{{gpus}} GPUs"}),
        Panel("Wait of nine of ten", "s", {_quantile("wait_seconds", 0.9, "gpus"): "{{gpus}} GPUs"}),
        Panel(
            "Wait of nine of ten, by tenant",
            "s",
            {_most(_quantile("tenant_wait_seconds", 0.9, "tenant")): "{{tenant}}"},
        ),
        Panel("Replicas that wait, by reason", "short", {"moorage_waiting_replicas": "{{reason}}"}, stacked=True),
        Panel(
            "Where waits of a week went, in hours of replicas",
            "h",
            {"sum by (cause) (increase(moorage_waited_seconds_total[7d])) / 3600": "{{cause}}"},
            stacked=True,
        ),
        Panel(
            "The same in GPU-hours",
            "h",
            {"sum by (cause) (increase(moorage_waited_gpu_seconds_total[7d])) / 3600": "{{cause}}"},
            stacked=True,
        ),
    ),
    "Tenants": (
        Panel(
            "GPU hours granted in the last whole hour",
            "h",
            {_most("sum by (tenant) (moorage_tenant_granted_gpu_seconds) / 3600"): "{{tenant}}"},
            stacked=True,
        ),
        Panel(
            "Of these, at work",
            "percentunit",
            {
                _most(
                    "sum by (tenant) (moorage_tenant_used_gpu_seconds)"
                    " / sum by (tenant) (moorage_tenant_granted_gpu_seconds)"
                ): "{{tenant}}"
            },
        ),
        Panel(
            "Leased GPUs, and limits",
            "short",
            {
                _most("moorage_tenant_leased_gpus"): "{{tenant}}",
                _most("moorage_tenant_limit_gpus"): "{{tenant}}, its limit",
            },
        ),
        Panel("Live jobs", "short", {_most("moorage_tenant_live_jobs"): "{{tenant}}"}, stacked=True),
        Panel(
            "Jobs that ended in an hour, by state",
            "short",
            {"sum by (state) (increase(moorage_ended_jobs_total[1h]))": "{{state}}"},
            stacked=True,
        ),
        Panel(
            "Jobs that failed in an hour, by tenant",
            "short",
            {_most(f"sum by (tenant) (increase(moorage_ended_jobs_total{FAILED}[1h]))"): "{{tenant}}"},
        ),
    ),
    "Services": (
        Panel("Calls in a second", "reqps", {_most(_by_service("calls_total")): "{{tenant}}/{{service}}"}),
        Panel(
            "Calls answered with an error, in a second",
            "reqps",
            {_most(_by_service("errors_total", "code")): "{{tenant}}/{{service}}, {{code}}"},
        ),
        Panel(
            "Nine of ten calls waited, and ran",
            "s",
            {
                _most(_calls_quantile("wait")): "{{tenant}}/{{service}} waited",
                _most(_calls_quantile("run")): "{{tenant}}/{{service}} ran",
            },
        ),
        Panel(
            "Members, and services woken in an hour",
            "short",
            {
                _most("moorage_service_members"): "{{tenant}}/{{service}}",
                _most("increase(moorage_service_woken_total[1h]) > 0"): "{{tenant}}/{{service}}, woken",
            },
        ),
    ),
    "What runs it": (
        Panel(
            "Leader",
            "short",
            {"moorage_up": "a leader answers", "changes(moorage_epoch[1h])": "takeovers in an hour"},
        ),
        Panel(
            "An append to the ledger, in the mean",
            "s",
            {f"{_rate('ledger_append_seconds_sum')} / {_rate('ledger_append_seconds_count')}": "until it is stored"},
        ),
        Panel(
            "Copies of the ledger and workers that lack",
            "short",
            {
                "moorage_ledger_copies_lacking": "copies not up to date",
                'sum by (state) (moorage_workers{state!="up"})': "workers, {{state}}",
            },
        ),
        Panel(
            "GPUs out of use, and failures",
            "short",
            {
                'sum by (state) (moorage_gpus{state=~"sick|foreign|lost"})': "GPUs, {{state}}",
                "sum by (what) (increase(moorage_failures_total[1h]))": "failures in the last hour, {{what}}",
                "moorage_request_queue_bytes / moorage_request_queue_bytes_max": "durable queue, filled",
            },
        ),
    ),
}


def metrics() -> dict[str, str]:
    """Return every metric of `moorage metrics` with its help."""
    fleet = FleetAnswer(
        ledger_copies=LedgerCopies(wanted=1), request_queue=RequestQueueRow(), contained=ContainedFailures()
    )
    tenant = TenantRow("vision", 0, 0, limit=Limit(gpus=1))
    waits = Waits(buckets_s=[1.0], rows=[WaitRow(gpus="1", tenant="vision", jobs=[0, 0])])
    usage = [UsageRow(tenant="vision", model="H100")]
    return {family.name: family.documentation for family in families(Told(fleet, [tenant], waits, usage))}


def named(query: str) -> list[str]:
    """Return the metrics that a query names, without what histograms add to a name."""
    return [re.sub(r"_(bucket|sum|count|total)$", "", name) for name in re.findall(r"\bmoorage_\w+", query)]


def board() -> str:
    """Return the board as JSON. Raises KeyError if a query names a metric that there is not."""
    helps = metrics()
    made = (
        dashboard.Dashboard("moorage")
        .uid("moorage")
        .tags(["moorage"])
        .readonly()
        .timezone("browser")
        .refresh("30s")
        .time("now-6h", "now")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    )
    number = itertools.count(1)
    for title, panels in ROWS.items():
        made = made.with_row(dashboard.Row(title).id(next(number)))
        for panel in panels:
            made = made.with_panel(_drawn(panel, helps).id(next(number)))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _drawn(panel: Panel, helps: dict[str, str]) -> timeseries.Panel:
    names = list(dict.fromkeys(name for query in panel.queries for name in named(query)))
    drawn = (
        timeseries.Panel()
        .title(panel.title)
        .description("\n\n".join(f"`{name}`: {helps[name]}" for name in names))
        .datasource(SOURCE)
        .unit(panel.unit)
        .min(0)
        .height(8)
        .span(6)
        .show_points(VisibilityMode.NEVER)
        .fill_opacity(20 if panel.stacked else 0)
    )
    if panel.stacked:
        drawn = drawn.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for at, (query, legend) in enumerate(panel.queries.items()):
        asked = prometheus.Dataquery().datasource(SOURCE).expr(query).legend_format(legend).ref_id(chr(ord("A") + at))
        drawn = drawn.with_target(asked.range())
    return drawn
