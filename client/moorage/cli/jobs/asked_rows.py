"""What a job's request says, in rows for people: each field that is not its default, in the unit of its option."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from moorage.client.durations import exact
from moorage.schemas.units import many

#: bytes of the size words of `--service`
_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

Rows = list[tuple[str, Any]]


def asked_rows(request: Mapping[str, Any], brought: str = "") -> Rows:
    """Return a row for each field that a request sets, but for those with a row of their own: its command, priority,
    GPUs, service, items and jobs to wait for.

    `brought` names its files, if it is known.
    """
    run, gpu = request.get("run") or {}, request.get("gpu") or {}
    return [
        ("person", request.get("person")),
        ("hosts", "one for each replica" if gpu.get("distinct_hosts") else None),
        ("gpu also", _gpu_words(gpu)),
        ("numbers", request.get("indices")),
        ("at once", request.get("max_running")),
        ("failures", _failures(request)),
        ("resources", _resources(request.get("resources") or {})),
        ("groups", _json(request.get("groups"))),
        ("requires", words(f"{name}={','.join(each)}" for name, each in (request.get("requires") or {}).items())),
        ("where", words(request.get("where") or ())),
        ("prefers", words(request.get("prefers") or ())),
        ("same", _same(request.get("same"))),
        ("spread over", request.get("spread_over")),
        ("each worker", _each_worker(request.get("each_worker"))),
        ("fair key", request.get("fair_key")),
        ("its weight", request.get("fair_weight")),
        ("uses", words(f"{name}={each}" for name, each in (request.get("uses") or {}).items())),
        ("labels", words(f"{name}={each}" for name, each in (request.get("labels") or {}).items())),
        ("driver", run.get("driver")),
        ("settings", _json(request.get("driver_config"))),
        ("image", run.get("image")),
        ("user", run.get("user")),
        ("folder", None if run.get("cwd") is None else words((run["cwd"],))),
        ("env", words(f"{name}={each}" for name, each in _env(run) if isinstance(each, str))),
        ("secrets", words(f"{name}={each['secret']}" for name, each in _env(run) if not isinstance(each, str))),
        ("time limit", _time(run.get("timeout_s"))),
        ("grace", _time(run.get("grace_s"))),
        ("deadline", _time(request.get("deadline_s"))),
        ("starts within", _time(request.get("start_within_s"))),
        ("or refused", _or_refused(request.get("or_refuse"))),
        ("starts after", _time(request.get("start_after_s"))),
        ("retries", request.get("retries")),
        ("retries if lost", request.get("retries_on_lost")),
        ("repair", _time(request.get("repair_s"))),
        ("retry", _retry(request.get("retry") or ())),
        ("restart", _restart(run)),
        ("files", brought or run.get("files")),
        ("keeps", words(run.get("keep") or ())),
        ("checkpoint", _checkpoint(run)),
        ("data", words(f"{name}={each}" for name, each in (run.get("data") or {}).items())),
        ("setup limit", _time(run.get("setup_s"))),
        ("stall", _stall(run)),
        ("ready when", _ready(run.get("ready") or {})),
        ("own ports", run.get("ports")),
        ("calls services", "yes" if run.get("calls") else None),
        ("stdin", run.get("stdin")),
        ("if cut off", request.get("on_partition")),
        ("if none fits", None if request.get("on_no_match") == "reject" else "waits"),
        ("qos", request.get("qos")),
        ("preemptible", "yes" if request.get("preemptible") else None),
        ("from the start", "on hold" if request.get("hold") else None),
        ("instead of", request.get("instead_of")),
        ("if at record", request.get("if_seq")),
    ]


def words(given: Iterable[str]) -> str:
    """Return words as a shell would take them; one that is not printable is in JSON's quotes, with its escapes."""
    return " ".join(shlex.quote(word) if word.isprintable() else json.dumps(word) for word in given)


def service_words(service: Mapping[str, Any] | None) -> str:
    """Return which service's calls the job answers, and how many at a time; "" if it answers none."""
    if not service:
        return ""
    calls, batch, queue = many(service.get("concurrency", 1), "call"), service.get("batch"), service.get("queue") or {}
    if batch:
        calls = f"{service.get('concurrency', 1)} × {many(batch['most'], 'call')}"
    parts = [
        f"{service['name']}, {calls} at a time",
        f"over HTTP {_json(service['http'])}" if service.get("http") else "",
        f"a call waits {batch['wait_ms']}ms for others" if batch and batch.get("wait_ms") else "",
        f"serves {', '.join(service['models'])}" if service.get("models") else "",
        f"{queue['most']} may wait for each member" if queue.get("most") is not None else "",
        f"a call waits {exact(queue['wait_s'])} for a place" if "wait_s" in queue else "",
        f"takes {_size(service['input_bytes'])}" if "input_bytes" in service else "",
        f"answers {_size(service['output_bytes'])}" if "output_bytes" in service else "",
        f"sleeps after {exact(service['sleep_after_s'])} without a call" if service.get("sleep_after_s") else "",
        f"woken within {exact(service['wake_within_s'])}" if service.get("wake_within_s") else "",
        f"by requests {_json(service['sleep_by'])}" if service.get("sleep_by") else "",
        f"awake {exact(service['awake_s'])} at least" if "awake_s" in service else "",
        "packed" if service.get("pack") else "",
    ]
    return ", ".join(filter(None, parts))


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else exact(seconds)


def _json(value: Any) -> str | None:
    return json.dumps(value, ensure_ascii=False) if value else None


def _env(run: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return (run.get("env") or {}).items()


def _size(count: int) -> str:
    return next((f"{count // size}{unit}" for size, unit in _SIZES if count % size == 0), many(count, "byte"))


def _each_worker(value: bool | str | None) -> str | None:
    return None if not value else "once" if value == "once" else "also later ones"


def _same(labels: Sequence[str] | None) -> str | None:
    return None if labels is None else words(labels) if labels else "any"


def _failures(request: Mapping[str, Any]) -> str | None:
    """Return at which number of failed replicas the others are cancelled; None where the request does not say it."""
    if "max_failed" not in request:
        return None
    most = request["max_failed"]
    return "never cancel the others" if most is None else f"{most} cancel the others"


def _resources(resources: Mapping[str, Any]) -> str:
    mib = resources.get("memory_mib", 0)
    memory = f"{mib // 1024}Gi" if mib % 1024 == 0 else f"{mib}Mi"
    return ", ".join(
        [f"{resources.get('cpu_milli', 0) / 1000:.15g} cores"] * ("cpu_milli" in resources)
        + [f"{memory} of memory"] * bool(mib)
        + [f"{resources.get('enforce')} enforced"] * ("enforce" in resources)
    )


def _gpu_words(gpu: Mapping[str, Any]) -> str:
    """Return what a request asks of GPUs beyond its token."""
    vendor, enforce, ranks = gpu.get("vendor"), gpu.get("enforce") or {}, gpu.get("distributed")
    backend, port = (ranks.get("backend", "nccl"), ranks.get("master_port", 29500)) if ranks is not None else ("", 0)
    named = [
        f"{name.replace('_', ' ')} {gpu[name]}"
        for name in ("mode", "profile", "scheduling", "mps_pipe_dir", "mps_log_dir", "time_slice_index",
                     "time_slicing_config_path")
        if gpu.get(name) is not None
    ]  # fmt: skip
    return ", ".join(
        [f"vendor {vendor or 'any'}"] * (vendor is not None)
        + [f"compute capability {gpu.get('min_compute_capability')}"] * ("min_compute_capability" in gpu)
        + named
        + [f"prefers to {gpu.get('prefer')}"] * ("prefer" in gpu)
        + ["joined by nvlink"] * ("topology" in gpu)
        + [f"{name} kept {enforce[name]}" for name in ("memory", "compute") if enforce.get(name)]
        + [f"ranks meet by {backend} on port {port}"] * (ranks is not None)
    )


def _retry(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows of `retry` as `--retry` takes them."""
    found = []
    for row in rows:
        causes = row["on"] if isinstance(row["on"], str) else ",".join(row["on"])
        found.append(f"{causes}:{row['times']}" + (f",pause={exact(row['pause_s'])}" if "pause_s" in row else ""))
    return " ".join(found)


def _restart(run: Mapping[str, Any]) -> str | None:
    most, unready_s = run.get("max_restarts"), run.get("restart_unready_s")
    parts = (
        run.get("restart"),
        None if most is None else f"at most {most} times",
        None if unready_s is None else f"after {exact(unready_s)} unready",
    )
    return ", ".join(part for part in parts if part) or None


def _checkpoint(run: Mapping[str, Any]) -> str:
    signal = run.get("checkpoint_signal")
    before_s = run.get("checkpoint_before_s", 60.0)
    every_s = run.get("checkpoint_every_s")
    parts = (
        run.get("checkpoint"),
        None if every_s is None else f"every {exact(every_s)}" if every_s else "at the end alone",
        f"{signal} {exact(before_s)} before the end" if signal else "",
        f"step by {run['checkpoint_step']}" if "checkpoint_step" in run else "",
    )
    return ", ".join(filter(None, parts))


def _stall(run: Mapping[str, Any]) -> str | None:
    if run.get("stall_s") is None:
        return None
    return f"{run.get('on_stall', 'warn')} after {exact(run['stall_s'])} without output and work"


def _ready(ready: Mapping[str, Any]) -> str:
    check = next((f"{name}:{ready[name]}" for name in ("tcp", "http", "file") if ready.get(name) is not None), "call")
    if not ready:
        return ""
    times = f"{check} within {exact(ready.get('within_s', 120.0))}, every {exact(ready.get('every_s', 5.0))}"
    return times if ready.get("for_s") is None else f"{times}, for {exact(ready['for_s'])}"


def _or_refused(part: float | None) -> str:
    return "" if part is None else f"unless it starts so in {round(10 * part)} of 10 cases"
