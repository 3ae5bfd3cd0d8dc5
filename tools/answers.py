"""What stands in `data` of answers, for the protocol page."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, Final, get_args

import msgspec

from moorage.schemas.answers.fleet import FleetAnswer
from moorage.schemas.answers.jobs import (
    Cancelled,
    Explained,
    HistoryAnswer,
    JobsAnswer,
    ServicesAnswer,
    ShownJob,
    Uncancelled,
    Woken,
)
from moorage.schemas.answers.letters import Letter, LetterDone, LettersAnswer
from moorage.schemas.answers.operators import ActsAnswer, Audit, PastAnswer, PromisesAnswer, TenantsAnswer, UsageAnswer
from moorage.schemas.plan import Plan
from moorage.schemas.schedules import ScheduleDone, ScheduleList, ScheduleRan
from moorage.schemas.sizes import SizesAnswer
from moorage.schemas.waited import SeriesAnswer, WaitedAnswer
from tools.wire_types import fields_table

#: the data of an answer by its verb; the structs within come after it
DATA: Final[dict[str, type[msgspec.Struct]]] = {
    "plan": Plan,
    "ls": JobsAnswer,
    "show": ShownJob,
    "explain": Explained,
    "history": HistoryAnswer,
    "cancel": Cancelled,
    "uncancel": Uncancelled,
    "wake": Woken,
    "services": ServicesAnswer,
    "schedule ls": ScheduleList,
    "schedule add": ScheduleDone,
    "schedule run-now": ScheduleRan,
    "usage": UsageAnswer,
    "usage with waits": WaitedAnswer,
    "usage with series": SeriesAnswer,
    "usage with sizes": SizesAnswer,
    "usage with promises": PromisesAnswer,
    "admin.fleet": FleetAnswer,
    "admin.tenants": TenantsAnswer,
    "admin.audit": Audit,
    "admin.acts": ActsAnswer,
    "admin.acts with events": PastAnswer,
    "admin.dlq list": LettersAnswer,
    "admin.dlq show": Letter,
    "admin.dlq drop": LetterDone,
}


def parts_of(struct: type[msgspec.Struct], known: Collection[type] = ()) -> list[type[msgspec.Struct]]:
    """Return the structs that stand in the fields of an answer, in their order, without those that are `known`."""
    found: list[type[msgspec.Struct]] = []

    def look(kind: Any) -> None:
        for each in get_args(kind):
            look(each)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in (*found, *known):
            found.append(kind)
            for field in msgspec.structs.fields(kind):
                look(field.type)

    for field in msgspec.structs.fields(struct):
        look(field.type)
    return found


def answers(known: Mapping[type, str]) -> str:
    """The part of the protocol page; `known` structs have a heading elsewhere on it."""
    headings, parts = {**known, **{struct: f"Data of {verb}" for verb, struct in DATA.items()}}, []
    listed = [(verb, struct, parts_of(struct, headings)) for verb, struct in DATA.items()]
    text = "\n## Data of answers\n\nWhat is left out has its default. A later release may add fields.\n"
    for verb, struct, inner in listed:
        inner = [each for each in inner if each not in headings]
        headings |= {each: each.__name__ for each in inner}
        parts.append((f"### Data of `{verb}`", struct))
        parts += [(f"#### {each.__name__}", each) for each in inner]
    for heading, struct in parts:
        text += f"\n{heading}\n\n{inspect.getdoc(struct)}\n\n{fields_table(struct, headings)}\n"
    return text
