"""The protocol page: subjects, the request, operators' acts and every frame, each with its fields and an example."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.codec import FRAME_BYTES_MAX, REQUEST_BYTES_MAX
from moorage.schemas.frames import AgainAnswer, AgainAsked, LsAsked
from moorage.schemas.job import Request
from moorage.schemas.operate import ChangeAsked, Changed
from moorage.schemas.schedules import ScheduleAsked, ScheduleRow
from moorage.schemas.subjects import Subjects
from tools.answers import answers
from tools.examples_of_frames import ACTS, EXAMPLES, OF_REQUESTS, PARTS, REQUEST, ROWS
from tools.wire_types import fields_table

PAGES: Final = Path(__file__).resolve().parents[1] / "docs"
#: what stands above the tables of the page
SUBJECTS: Final = """Of the kinds, *asked* is answered from memory, and what is *public* names no job and no tenant.
`moorage` is the prefix of all, unless the settings name another.

| subject | kind | who writes | who reads | what |
| --- | --- | --- | --- | --- |
"""
ACTS_OF_OPERATORS: Final = (
    "Sent to `moorage.admin.<operator>.<verb>`. Unknown fields are refused, text is printable and bounded.\n"
)
FRAMES: Final = """Everything that is sent or answered: what it is, every field, and one as it looks. `kind` tells them
apart, and `v` is the version of the protocol. **A field that has its default may be left out**, so read it as the table
says. A client needs [Accepted](#accepted), [Problem](#problem), [Answer](#answer), [Event](#event) and
[Output](#output), an observer [Hello](#hello), [Load](#load) and [FleetFrame](#fleetframe). The rest is spoken between
schedulers and workers."""

HEADINGS: Final[dict[type, str]] = {
    Request: "The request",
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
        (PAGES / "protocol.head.md").read_text(),
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
    parts.append(f"\n## Fields of `ls`\n\n{inspect.getdoc(LsAsked)}\n\n{table_of(LsAsked)}\n")
    parts.append(f"\n## Fields of `again`\n\n{inspect.getdoc(AgainAsked)}\n\n{table_of(AgainAsked)}\n")
    parts.append(f"\n### Again: answer\n\n{inspect.getdoc(AgainAnswer)}\n\n{table_of(AgainAnswer)}\n")
    parts.append(f"\n## Fields of `change`\n\n{inspect.getdoc(ChangeAsked)}\n\n{table_of(ChangeAsked)}\n")
    parts.append(f"\n### Data of `change`\n\n{inspect.getdoc(Changed)}\n\n{table_of(Changed)}\n")
    parts.append(f"\n## Fields of `schedule`\n\n{inspect.getdoc(ScheduleAsked)}\n\n{table_of(ScheduleAsked)}\n")
    parts.append(answers(HEADINGS))
    parts.append(f"\n### Data of `schedule`\n\n{inspect.getdoc(ScheduleRow)}\n\n{table_of(ScheduleRow)}\n")
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
