"""Make from the code what repeats it: the protocol page, the states, the JSON schemas, `reference_pages`, and the
configurations of `deploy/nats`.

`python -m docs.generate` writes them, `--check` fails when what stands there is not what the code says.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from docs import reference_pages
from docs.wire_types import fields_table
from moorage.bus.site import shipped
from moorage.cli.settings import example_file, sections
from moorage.scheduler.core.config import CLUSTER_DEFAULTS
from moorage.schemas import frames, gpu, job, operate
from moorage.schemas.codec import FRAME_BYTES_MAX, REQUEST_BYTES_MAX
from moorage.schemas.described import json_schema
from moorage.schemas.errors import Problem
from moorage.schemas.job import STATES, Request
from moorage.schemas.release import RELEASE
from moorage.schemas.settings import Setting, declared, shown
from moorage.schemas.subjects import Subjects

DOCS: Final = Path(__file__).resolve().parent
HEAD: Final = "<!-- made by docs/generate.py from the code: edit the code, then `make docs` -->\n\n"

REQUEST: Final = b"""{
  "job": "train-42", "replicas": 1, "priority": 50,
  "gpu": {"count": 2, "model": ["H100", "A100"], "min_memory_mib": 70000},
  "resources": {"cpu_milli": 4000, "memory_mib": 16384},
  "run": {"argv": ["python3", "/srv/train.py"], "env": {"SEED": "7", "TOKEN": {"secret": "hf"}}, "timeout_s": 3600},
  "retries": 2, "deadline_s": 7200, "on_no_match": "wait"
}"""

_DEVICE = frames.Device(0, "nvidia", "NVIDIA H100 80GB HBM3", "GPU-6f0c", 81559, "0000:17:00.0")
_HELLO = frames.Hello(
    "node-7", "b1-1700000000", release="0.1.0", hostname="node-7", drivers=["process"], labels={"zone": "a"},
    cpu_milli=64000, memory_mib=515000, gpu_pool=[_DEVICE],
)  # fmt: skip
_MEMBER = ("vision", "train-42", 0, 1, 1729)
_SESSION = "5e55105e55105e55105e55105e55105e"
_CHANGE = frames.Change(2, 1763625600123, 0, 1, "PLACED", "node-7", ["GPU-6f0c"], fence=1729)
_EVENT = frames.Event("vision", "train-42", 2, "PLACED", 1729, [_CHANGE])

#: what an operator sends to each verb on jobs and tenants
ACTS: Final = (
    ("hold", operate.HoldAct(tenant="vision", job="train-42", by="ana", why="bad data")),
    ("release", operate.ReleaseAct(tenant="vision", job="train-42", by="ana")),
    ("requeue", operate.RequeueAct(tenant="vision", job="train-42", by="ana", why="wrong host")),
    ("priority", operate.PriorityAct(tenant="vision", job="train-42", priority=90, by="ana")),
    ("limit", operate.LimitAct(tenant="vision", gpus=16, jobs=500, by="ana")),
    ("feature-level", operate.FeatureLevelAct(level=2, schedulers=3, by="ana")),
    ("share", operate.ShareAct(tenant="vision", weight=3, gpus=16, by="ana")),
    ("dlq", operate.DlqAct(act="resend", sequence=12, by="ana", why="quota was raised")),
)

#: what stands above the tables of the page
SUBJECTS: Final = """Of the kinds, *asked* is answered from memory, and what is *public* names no job and no tenant.
`moorage` is the prefix of all, unless the settings name another.

| subject | kind | who writes | who reads | what |
| --- | --- | --- | --- | --- |
"""
ACTS_OF_OPERATORS: Final = (
    "Sent to `moorage.admin.<verb>`. Unknown fields are refused, text is printable and bounded.\n"
)
FRAMES: Final = """Everything that is sent or answered: what it is, every field, and one as it looks. `kind` tells them
apart, and `v` is the version of the protocol. **A field that has its default may be left out**, so read it as the table
says. A client needs [Accepted](#accepted), [Problem](#problem), [Answer](#answer), [Event](#event) and
[Output](#output), an observer [Hello](#hello), [Load](#load) and [FleetFrame](#fleetframe). The rest is spoken between
schedulers and workers."""

#: where each frame travels, and one of it
EXAMPLES: Final[list[tuple[str, str, Any]]] = [
    ("Accepted", "the answer to submit", frames.Accepted("train-42", 1729, "QUEUED")),
    ("Problem", "the answer to what went wrong, on any subject", Problem(
        "invalid-argument", "count must be 1..64, found 0", "caller", "$.gpu.count", "0", "1..64",
        "see docs/protocol.md for every field with an example")),
    ("Answer", "the answer to show, history, ls, explain, cancel and the operators' verbs", frames.Answer(
        "cancel", 1731, {"job": "train-42", "cancelled": True, "was": "QUEUED"})),
    ("Event", "moorage.event.<tenant>.<job>", _EVENT),
    ("Events", "moorage.events.<tenant>", frames.Events("vision", 1729, [_EVENT])),
    ("HistoryFrame", "moorage.history.<tenant>", frames.HistoryFrame("vision", list(STATES), {
        3: frames.HistoryWorker("node-7", {0: "GPU-6f0c"})}, [frames.Story(
            "train-42", 3, "CANCELLED", True, 1763625600000, 1729, [], [
                frames.Moved(2, 1763625600123, 0, 1, 1, 3, 1, 0, "", 1730),
                frames.Moved(3, 1763625600456, 0, 1, 11, 3, 1, 0, "superseded", 1730, "tenant:vision ann")])])),
    ("Output", "moorage.log.<tenant>.<job>.<replica>", frames.Output(1, "out", 0, "epoch 1\n")),
    ("LogPage", "the data of the answer to logs, and what a worker answers to ReadLog", frames.LogPage(
        1, "out", 0, 8, 8, "epoch 1\n", over=True, worker="node-7")),
    ("ReadLog", "moorage.worker.<worker>.logs", frames.ReadLog(
        _SESSION, *_MEMBER, "process", "out", 0, 65536, 1763625660000)),
    ("Hello", "moorage.hello.<worker>", _HELLO),
    ("Load", "moorage.load.<worker>", frames.Load("node-7", "b1-1700000000", 12, 3, gpu_pool=[
        frames.SlotLoad(0, True, 0, "exclusive", 97, 60211, 61)])),
    ("FleetFrame", "moorage.fleet.frame", frames.FleetFrame(3, 1729, workers=[
        {"worker": "node-7", "state": "up", "cells": "#", "simulated": False}], queued=4, running=1)),
    ("RollCall", "moorage.fleet.rollcall", frames.RollCall(3)),
    ("Standing", "moorage.fleet.standing", frames.Standing("s1-4711", RELEASE, 2, 1729, True)),
    ("Done", "the answer to an operator's act", operate.Done(
        "hold", True, tenant="vision", job="train-42", state="QUEUED",
        hold=operate.Hold(1763625600123, "ana", "bad data"))),
    ("DeadLetter", "moorage.dlq.<tenant>", operate.DeadLetter(
        "moorage.request.vision.submit", 1201, Problem("invalid-argument", "unknown field `gpus`", "caller", "$.gpus"),
        b'{"gpus":1}')),
    ("Look", "moorage.fleet.look", frames.Look(81021, 3)),
    ("Looked", "moorage.worker.<worker>.looked", frames.Looked("node-7", 81021, findings=[
        frames.Finding("nvml-foreign", 0, "GPU-6f0c", 8812, "python", 512)])),
    ("Join", "moorage.worker.<worker>.join", frames.Join("m-4c1f", "b1-1700000000", 4, _HELLO, facts=[
        frames.Fact("exited", *_MEMBER, 0, "exit")], holding=[frames.Held(*_MEMBER, "running")])),
    ("Joined", "the answer to join", frames.Joined(_SESSION, 4, 3, 2.0, 20.0, 5.0, "9d2e")),
    ("Goodbye", "moorage.worker.<worker>.join", frames.Goodbye(_SESSION)),
    ("Renew", "moorage.worker.<worker>.renew", frames.Renew(_SESSION, 9, 2, 3, [frames.Held(*_MEMBER, "running")])),
    ("Renewed", "the answer to renew", frames.Renewed(9, 3)),
    ("FactFrame", "moorage.worker.<worker>.fact", frames.FactFrame(_SESSION, 3, [
        frames.Fact("claimed", *_MEMBER), frames.Fact("started", *_MEMBER)])),
    ("FactAck", "the answer to fact", frames.FactAck(3, 3)),
    ("Wanted", "moorage.worker.<worker>.wanted", frames.Wanted("node-7", _SESSION, 3, place=[
        frames.Place(*_MEMBER, [0], "exclusive", False, b'{"job":"train-42","run":{"argv":["true"]}}')],
        end=[frames.End("vision", "old-1", 0, 1, 1700, "cancelling", 5.0)])),
]  # fmt: skip


#: parts of frames that have no example of their own: as objects, and as arrays
PARTS: Final[tuple[type[msgspec.Struct], ...]] = (
    frames.Change,
    frames.Device,
    frames.SlotLoad,
    frames.HistoryWorker,
    operate.Hold,
    operate.Limit,
    operate.Drain,
    operate.Share,
)
ROWS: Final[tuple[type[msgspec.Struct], ...]] = (
    frames.Held,
    frames.Fact,
    frames.Place,
    frames.Start,
    frames.End,
    frames.Finding,
    frames.Unwell,
    frames.Story,
    frames.Moved,
)
#: the objects of a request, by the heading that describes each
OF_REQUESTS: Final[dict[str, type[msgspec.Struct]]] = {
    "gpu": gpu.GpuSpec,
    "gpu.share": gpu.Share,
    "gpu.distributed": gpu.Distributed,
    "run": job.Run,
    "resources": job.Resources,
}
HEADINGS: Final[dict[type, str]] = {
    **{struct: heading for heading, struct in OF_REQUESTS.items()},
    **{type(example): name for name, _, example in EXAMPLES},
    **{part: part.__name__ for part in (*PARTS, *ROWS)},
}


def fenced(title: str, text: str) -> str:
    """JSON in a block. The title says what it is: any other word behind `json`, and the site shows no block."""
    return f'```json title="{title}"\n{text}\n```\n'


def table_of(struct: type[msgspec.Struct]) -> str:
    return fields_table(struct, HEADINGS)


def described(struct: type[msgspec.Struct], example: Any) -> str:
    text = json.dumps(msgspec.json.decode(msgspec.json.encode(example)), indent=1, ensure_ascii=False)
    shape = "an array in this order" if struct.__struct_config__.array_like else "an object"
    return f"{inspect.getdoc(struct)}\n\nTravels as {shape}.\n\n{table_of(struct)}\n\n{fenced('frame', text)}"


def protocol() -> str:
    subjects = Subjects()
    rows = "\n".join(f"| `{r.subject}` | {r.kind} | {r.writes} | {r.reads} | {r.what} |" for r in subjects.table())
    parts = [
        HEAD,
        (DOCS / "protocol.head.md").read_text(),
        "## Subjects\n\n" + SUBJECTS + rows,
        f"\n\n## The request\n\nAt most {REQUEST_BYTES_MAX // 1024} KiB; a frame {FRAME_BYTES_MAX // 1024} KiB. "
        f"Unknown fields are refused. Durations are in seconds, memory is in MiB.\n\n"
        f"{fenced('request', REQUEST.decode())}\n{inspect.getdoc(Request)}\n\n{table_of(Request)}\n",
    ]
    for title, struct in OF_REQUESTS.items():
        parts.append(f"\n### `{title}`\n\n{inspect.getdoc(struct)}\n\n{table_of(struct)}\n")
    parts.append(f"\n## Operators' acts\n\n{ACTS_OF_OPERATORS}")
    for verb, act in ACTS:
        text = msgspec.json.encode(act).decode()
        parts.append(f"\n### `admin.{verb}`\n\n{inspect.getdoc(type(act))}\n\n{table_of(type(act))}\n")
        parts.append(f"\n{fenced('act', text)}")
    parts.append(f"\n## Frames\n\n{FRAMES}\n")
    for name, where, example in EXAMPLES:
        parts.append(f"\n### {name}\n\n`{where}`\n\n{described(type(example), example)}")
    parts.append("\n### In frames\n")
    for part in PARTS:
        parts.append(f"\n#### {part.__name__}\n\n{inspect.getdoc(part)}\n\n{table_of(part)}\n")
    parts.append("\n### In arrays\n")
    for array in ROWS:
        parts.append(f"\n#### {array.__name__}\n\n{inspect.getdoc(array)}\n\n{table_of(array)}\n")
    return "".join(parts)


def settings() -> str:
    lines = [HEAD, (DOCS / "settings.head.md").read_text()]
    for name, struct in sections().items():
        lines.append(f"\n## `[{name}]`\n\n| key | what it is | default | allowed |\n| --- | --- | --- | --- |\n")
        for one in declared(name, struct).values():
            default = shown(one, one.default)
            if name == "scheduler" and one.key in CLUSTER_DEFAULTS:
                default += f" ({shown(one, CLUSTER_DEFAULTS[one.key])} with replicas)"
            row = (f"`{one.key}`", " ".join([one.help, *_named_otherwise(name, one)]), default, one.allowed)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n")
    return "".join(lines)


def _named_otherwise(section: str, one: Setting) -> list[str]:
    """The variable and the flag where they are not as the head of the page says."""
    variable, flag = f"MOORAGE_{section}_{one.key}".upper(), f"--{one.key.replace('_', '-')}"
    return [
        *([f"Variable `{one.env}`."] if one.env and one.env != variable else []),
        *(["No variable."] if not one.env else []),
        *([f"Flag `{one.flag}`."] if one.flag and one.flag != flag else []),
        *(["No flag."] if not one.flag else []),
    ]


def schema(kind: Any) -> str:
    return json.dumps(json_schema(kind), indent=1, sort_keys=True) + "\n"


def pages() -> dict[Path, str]:
    """Every generated file and what should stand in it."""
    made = {
        DOCS / "protocol.md": protocol(),
        DOCS / "reference" / "states.md": HEAD + reference_pages.states(),
        DOCS / "reference" / "errors.md": HEAD + reference_pages.errors(),
        DOCS / "reference" / "cli.md": HEAD + reference_pages.command(),
        DOCS / "reference" / "permissions.md": HEAD + reference_pages.permissions(),
        DOCS / "reference" / "python.md": HEAD + reference_pages.python_api(),
        DOCS / "reference" / "settings.md": settings(),
        DOCS / "examples" / "moorage.toml": example_file(),
        DOCS / "schemas" / "request.json": schema(Request),
    }
    for name, _, example in EXAMPLES:
        made[DOCS / "schemas" / f"{name.lower()}.json"] = schema(type(example))
    for folder, files in shipped().items():
        made |= {DOCS.parent / "deploy" / "nats" / folder / name: text for name, text in files.items()}
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is stale")
    check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"stale: {path.relative_to(DOCS.parent)} (run `make docs`)")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path])
            print(f"wrote {path.relative_to(DOCS.parent)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
