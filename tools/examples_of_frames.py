"""One of everything that is sent, for the protocol page: a request, an operator's act of each kind, and every frame."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from moorage.schemas import frames, gpu, job, operate, staying
from moorage.schemas.capabilities import KNOWN, Capabilities
from moorage.schemas.errors import Problem
from moorage.schemas.job import STATES
from moorage.schemas.release import RELEASE

REQUEST: Final = b"""{
  "job": "train-42", "replicas": 1, "priority": 50,
  "gpu": {"count": 2, "model": ["H100", "A100"], "min_memory_mib": 70000},
  "resources": {"cpu_milli": 4000, "memory_mib": 16384},
  "run": {"argv": ["python3", "/srv/train.py"], "env": {"SEED": "7", "TOKEN": {"secret": "hf"}}, "timeout_s": 3600},
  "retries": 2, "deadline_s": 7200, "on_no_match": "wait"
}"""

_DEVICE = frames.Device(0, "nvidia", "NVIDIA H100 80GB HBM3", "GPU-6f0c", 81559, "0000:17:00.0")
_HELLO = frames.Hello(
    "node-7",
    "b1-1700000000",
    release="0.1.0",
    hostname="node-7",
    drivers=["process"],
    capabilities={"process": KNOWN["process"]},
    labels={"zone": "a"},
    cpu_milli=64000,
    memory_mib=515000,
    gpu_pool=[_DEVICE],
)
_ATTEMPT = ("vision", "train-42", 0, 1, 1729)
_SESSION = "5e55105e55105e55105e55105e55105e"
_CHANGE = frames.Change(2, 1763625600123, 0, 1, "PLACED", "node-7", ["GPU-6f0c"], fence=1729)
_EVENT = frames.Event("vision", "train-42", 2, "PLACED", 1729, [_CHANGE])

#: what an operator sends to each verb
ACTS: Final = (
    ("hold", operate.HoldAct(tenant="vision", job="train-42", by="ana", why="bad data")),
    ("release", operate.ReleaseAct(tenant="vision", job="train-42", by="ana")),
    ("requeue", operate.RequeueAct(tenant="vision", job="train-42", by="ana", why="wrong host")),
    ("place", operate.PlaceAct(tenant="vision", job="check-n07", on="node-7", by="ana")),
    ("freeze", operate.FreezeAct(tenant="vision", job="train-42", by="ana", why="room for an hour")),
    ("resume", operate.ResumeAct(tenant="vision", job="train-42", by="ana")),
    ("priority", operate.PriorityAct(tenant="vision", job="train-42", priority=90, by="ana")),
    ("resize", operate.ResizeAct(tenant="vision", job="eval-7", memory_mib=8192, compute_percent=40, by="ana")),
    ("time-limit", operate.TimeLimitAct(tenant="vision", job="train-42", timeout_s=36000, by="ana")),
    ("limit", operate.LimitAct(tenant="vision", gpus=16, jobs=500, by="ana")),
    ("counter", operate.CounterAct(name="matlab", most=20, by="ana")),
    ("feature-level", operate.FeatureLevelAct(level=2, schedulers=3, by="ana")),
    ("share", operate.ShareAct(tenant="vision", weight=3, gpus=16, by="ana")),
    ("cordon", operate.CordonAct(worker="node-7", by="ana")),
    ("uncordon", operate.UncordonAct(worker="node-7", by="ana")),
    ("drain", operate.DrainAct(worker="node-7", within_s=1800, for_s=7200, by="ana", why="new disks")),
    ("forget", operate.ForgetAct(worker="node-9", by="ana", why="sold")),
    ("admit", operate.AdmitAct(worker="spot-3", pool="spot", token="UAT6QVZX", host="ip-10-0-0-7")),
    ("dlq", operate.DlqAct(act="resend", sequence=12, by="ana", why="quota was raised")),
)

#: where each frame travels, and one of it
EXAMPLES: Final[list[tuple[str, str, Any]]] = [
    ("Accepted", "the answer to submit", frames.Accepted("train-42", 1729, "QUEUED")),
    (
        "Problem",
        "the answer to what went wrong, on any subject",
        Problem(
            "invalid-argument",
            "count must be 1..64, found 0",
            "caller",
            "$.gpu.count",
            "0",
            "1..64",
            "see docs/protocol.md for every field with an example",
        ),
    ),
    (
        "Answer",
        "the answer to show, history, ls, explain, cancel and the operators' verbs",
        frames.Answer("cancel", 1731, {"job": "train-42", "cancelled": True, "was": "QUEUED"}),
    ),
    ("Event", "moorage.event.<tenant>.<job>", _EVENT),
    ("Events", "moorage.events.<tenant>", frames.Events("vision", 1729, [_EVENT])),
    (
        "FleetEvent",
        "moorage.events._fleet",
        frames.FleetEvent("draining", 1763625600123, 1731, "node-7", by="operator:ana", why="new disks"),
    ),
    (
        "HistoryFrame",
        "moorage.history.<tenant>",
        frames.HistoryFrame(
            "vision",
            list(STATES),
            {3: frames.HistoryWorker("node-7", {0: "GPU-6f0c"})},
            [
                frames.JobHistory(
                    "train-42",
                    3,
                    "CANCELLED",
                    True,
                    1763625600000,
                    1729,
                    [],
                    [
                        frames.Moved(2, 1763625600123, 0, 1, 1, 3, 1, 0, "", 1730),
                        frames.Moved(3, 1763625600456, 0, 1, 11, 3, 1, 0, "superseded", 1730, "tenant:vision ann"),
                    ],
                )
            ],
        ),
    ),
    ("Output", "moorage.log.<tenant>.<job>.<replica>", frames.Output(1, "out", 0, "epoch 1\n")),
    (
        "Results",
        "moorage.log.<tenant>.~.0",
        frames.Results([frames.ResultLine("train-42.0.1729", 12, "application/json", {"loss": 0.3})]),
    ),
    (
        "LogPage",
        "the data of the answer to logs, and what a worker answers to ReadLog",
        frames.LogPage(1, "out", 0, 8, 8, "epoch 1\n", over=True, worker="node-7"),
    ),
    (
        "ReadLog",
        "moorage.worker.<worker>.logs",
        frames.ReadLog(_SESSION, *_ATTEMPT, "process", "out", 0, 65536, 1763625660000),
    ),
    (
        "UsePage",
        "the data of the answer to use, and what a worker answers to ReadUse",
        frames.UsePage(
            0,
            1,
            2.0,
            [frames.UseLine(0, _HELLO.gpu_pool[0].uuid, "NVIDIA H100", 81559, [97, 99], [60211, 60211], [655, None])],
            worker="node-7",
        ),
    ),
    ("ReadUse", "moorage.worker.<worker>.logs", frames.ReadUse(_SESSION, *_ATTEMPT, 4, 2)),
    (
        "ReportsPage",
        "the data of the answer to reports, and what a worker answers to ReadReports",
        frames.ReportsPage(0, 1, [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}], worker="node-7"),
    ),
    ("ReadReports", "moorage.worker.<worker>.logs", frames.ReadReports(_SESSION, *_ATTEMPT)),
    (
        "Rescued",
        "the data of the answer to rescue, and what a worker answers to Rescue",
        frames.Rescued(1, "rescued.train-42.0.1729", stored=True, worker="node-7"),
    ),
    ("Rescue", "moorage.worker.<worker>.logs", frames.Rescue(_SESSION, *_ATTEMPT, "process", "out")),
    ("Hello", "moorage.hello.<worker>", _HELLO),
    (
        "Load",
        "moorage.load.<worker>",
        frames.Load(
            "node-7", "b1-1700000000", 12, 3, gpu_pool=[frames.SlotLoad(0, True, 0, "exclusive", 97, 60211, 61)]
        ),
    ),
    (
        "FleetFrame",
        "moorage.fleet.frame",
        frames.FleetFrame(
            3,
            1729,
            workers=[frames.FleetRow("node-7", "up", "#")],
            queued=4,
            running=1,
            ledger_copies=frames.LedgerCopies(wanted=3, lacking=["moorage-2"], seen_ms_ago=840),
        ),
    ),
    (
        "FleetDetail",
        "moorage.fleet.detail",
        frames.FleetDetail(
            3,
            1729,
            tenants=[frames.TenantDetail(tenant="vision", jobs=12, gpus=8, waiting=4)],
            tenants_of=1,
            jobs=[
                frames.UsedJob(
                    tenant="vision",
                    job="train-42",
                    worker="node-7",
                    gpu="2xH100",
                    devices=2,
                    percent=45,
                    percent_min=0,
                    percent_max=91,
                    memory_mib=120400,
                    idle_ms=61000,
                )
            ],
            jobs_of=1,
            ended={"vision": {"SUCCEEDED": 310, "FAILED": 4}},
        ),
    ),
    ("RollCall", "moorage.fleet.rollcall", frames.RollCall(3)),
    ("Standing", "moorage.fleet.standing", frames.Standing("s1-4711", RELEASE, 2, 1729, True)),
    (
        "Done",
        "the answer to an operator's act",
        operate.Done(
            "hold",
            True,
            tenant="vision",
            job="train-42",
            state="QUEUED",
            hold=operate.Hold(1763625600123, "ana", "bad data"),
        ),
    ),
    (
        "DeadLetter",
        "moorage.dlq.<tenant>",
        operate.DeadLetter(
            "moorage.request.vision.submit",
            1201,
            Problem("invalid-argument", "unknown field `gpus`", "caller", "$.gpus"),
            b'{"gpus":1}',
        ),
    ),
    ("Look", "moorage.fleet.look", frames.Look(81021, 3)),
    (
        "Looked",
        "moorage.worker.<worker>.looked",
        frames.Looked("node-7", 81021, findings=[frames.Finding("nvml-foreign", 0, "GPU-6f0c", 8812, "python", 512)]),
    ),
    (
        "Join",
        "moorage.worker.<worker>.join",
        frames.Join(
            "m-4c1f",
            "b1-1700000000",
            4,
            _HELLO,
            reports=[frames.Report("exited", *_ATTEMPT, 0, "exit")],
            holding=[frames.Held(*_ATTEMPT, "running")],
        ),
    ),
    ("Joined", "the answer to join", frames.Joined(_SESSION, 4, 3, 2.0, 20.0, 5.0, "9d2e")),
    ("Goodbye", "moorage.worker.<worker>.join", frames.Goodbye(_SESSION)),
    ("Renew", "moorage.worker.<worker>.renew", frames.Renew(_SESSION, 9, 2, 3, [frames.Held(*_ATTEMPT, "running")])),
    ("Renewed", "the answer to renew", frames.Renewed(9, 3, sets=[frames.GangSets(*_ATTEMPT, ["SHA-256=…"])])),
    (
        "ReportFrame",
        "moorage.worker.<worker>.fact",
        frames.ReportFrame(_SESSION, 3, [frames.Report("claimed", *_ATTEMPT), frames.Report("started", *_ATTEMPT)]),
    ),
    ("ReportAck", "the answer to fact", frames.ReportAck(3, 3)),
    (
        "Wanted",
        "moorage.worker.<worker>.wanted",
        frames.Wanted(
            "node-7",
            _SESSION,
            3,
            place=[frames.Place(*_ATTEMPT, [0], "exclusive", False, b'{"job":"train-42","run":{"argv":["true"]}}')],
            end=[frames.End("vision", "old-1", 0, 1, 1700, "cancelling", 5.0)],
        ),
    ),
]

#: parts of frames that have no example of their own: as objects, and as arrays
PARTS: Final[tuple[type[msgspec.Struct], ...]] = (
    frames.Change,
    Capabilities,
    frames.Device,
    frames.SlotLoad,
    frames.TenantDetail,
    frames.UsedJob,
    frames.ServiceLately,
    frames.FailedLately,
    frames.HistoryWorker,
    operate.Hold,
    operate.Limit,
    operate.Drain,
    operate.Share,
)
ROWS: Final[tuple[type[msgspec.Struct], ...]] = (
    frames.Held,
    frames.Report,
    frames.Place,
    frames.Start,
    frames.End,
    frames.Finding,
    frames.Unwell,
    frames.JobHistory,
    frames.Moved,
)
#: the objects of a request, by the heading that describes each
OF_REQUESTS: Final[dict[str, type[msgspec.Struct]]] = {
    "gpu": gpu.GpuSpec,
    "gpu.share": gpu.Share,
    "gpu.distributed": gpu.Distributed,
    "run": job.Run,
    "run.ready": staying.Ready,
    "resources": job.Resources,
}
