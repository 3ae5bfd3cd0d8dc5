"""What a tenant may ask of its schedules on `moorage.api.<tenant>.schedule`, and how they are shown.

A schedule submits a request again and again: each run is a job of its own, `<name>-<number>`, with the label
`schedule=<name>`. nats-server counts the time, by its message schedules, and the leader makes a run that it forgot. An
interval (`@every`) is the leader's alone and counts from when the schedule was added. The number is that of the run's
message in their stream, which all schedules share: it grows, with gaps.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from moorage.schemas.always import always
from moorage.schemas.decode_errors import asked_as
from moorage.schemas.names import JOB, is_job
from moorage.schemas.operate import BY_CHARS_MAX

#: a run's job id is the name, a hyphen and a number
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
is_schedule = NAME.fullmatch
#: the label that names the schedule of a run
LABEL: Final = "schedule"
#: schedules of one tenant
SCHEDULES_MAX: Final = 1_000
CRON_CHARS_MAX: Final = 200
ZONE_CHARS_MAX: Final = 64
#: a name that nats-server takes for the zone of its own machine, which no other server or scheduler knows
SERVERS_ZONE: Final = "Local"
#: the oldest nats-server that repeats messages
SERVER_MIN: Final = (2, 14)
#: how a time is written
CRON_WORDS: Final = "five fields of cron, six with seconds first, @every 90s, @hourly, @daily, @weekly, @monthly"
#: what a run does while the last one goes on
Overlap = Literal["skip", "queue"]
#: fields of a request that belong to one submit, or that do not last as long as a schedule
NOT_SCHEDULED: Final = {
    "job": "each run has an id of its own",
    "if_seq": "it is about one moment of the ledger",
    "after": "a job that it names is forgotten some day, and no run starts from then on",
    "start_after_s": "cron says when a run is made",
    "run.files_of": "what a job has kept is there for some days only",
}


def cron_of(text: str) -> str:
    """Return a time as nats-server reads it: six fields, or a word such as `@every 90s`. Raises ValueError.

    The server checks the fields themselves.
    """
    words = text.split()
    if not words or len(text) > CRON_CHARS_MAX or not text.isprintable():
        raise ValueError(f"cron must be {CRON_WORDS}, found {text[:80]!r}")
    if words[0].startswith("@"):
        if words[0] == "@at":
            raise ValueError("cron must repeat; for one job at a time there is start_after_s of a request")
        return " ".join(words)
    if len(words) not in (5, 6):
        raise ValueError(f"cron must be {CRON_WORDS}, found {len(words)} fields")
    return " ".join(words if len(words) == 6 else ["0", *words])


def _has(request: Any, field: str) -> bool:
    """Return whether a request has a field, as `run.files`."""
    first, _, rest = field.partition(".")
    value = request.get(first) if isinstance(request, dict) else None
    return _has(value, rest) if rest else value is not None


class ScheduleAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What a tenant asks of its schedules: `ls`, or one by its `name`.

    - `add` needs `cron` and `request`, as `submit` takes it, without `job`, `if_seq`, `after`, `start_after_s`,
      `run.files_of`. Its `run.files` are in the bucket `<PREFIX>_SCHEDULES_<tenant>`, which is bounded in all and drops
      nothing; whoever removes the schedule removes them. The same again changes nothing; other content under a name
      that is taken is refused with `conflict`.
    - `pause` ends its runs until `resume`; jobs that run go on. `remove` forgets it.
    - `run-now` makes a run at once, also of one that is paused, and answers with its job.
    - Refused with `not-found`; with `failed-precondition` for more than 1,000 schedules, for a run while the last one
      goes on (`skip`), and where nats-server is older than 2.14.
    """

    act: Literal["ls", "show", "add", "pause", "resume", "run-now", "remove"] = "ls"
    name: str = ""  # 1..40 letters, digits, _ and -
    cron: str = ""  # five fields of cron, or six with seconds first, or @every 90s, @hourly, @daily, @weekly, @monthly
    tz: str = ""  # the time zone of the fields, as Europe/Berlin; UTC if it is left out
    overlap: Overlap = "skip"  # while the last one goes on, a run is left out, or is started behind all before it
    request: dict[str, Any] | None = None
    key: str = ""  # of `run-now`, with the characters of a job id: the same key again makes no second run
    by: str = ""  # the caller's own name, at most 64 characters; it is not proven

    def __post_init__(self) -> None:
        if len(self.by) > BY_CHARS_MAX or not self.by.isprintable():
            raise ValueError(f"by must be at most {BY_CHARS_MAX} printable characters, found {self.by[:80]!r}")
        if self.key and not is_job(self.key):
            raise ValueError(f"key must match {JOB.pattern}, found {self.key[:80]!r}")
        if self.act != "ls" and not is_schedule(self.name):
            raise ValueError(f"name must match {NAME.pattern}, found {self.name[:80]!r}")
        if len(self.tz) > ZONE_CHARS_MAX or not self.tz.isprintable() or self.tz == SERVERS_ZONE:
            raise ValueError(f"tz must be a time zone such as Europe/Berlin, found {self.tz[:80]!r}")
        if (self.act == "add") != (self.request is not None):
            found = "none" if self.request is None else "one"
            raise ValueError(f"request must be there with add, and with nothing else, found {found} with {self.act}")
        if self.act == "add":
            if cron_of(self.cron).startswith("@every") and self.tz:
                raise ValueError(f"tz must be left out with @every, found {self.tz!r}")
            for field, why in NOT_SCHEDULED.items():
                if _has(self.request, field):
                    raise ValueError(f"request must have no {field}: {why}")
            run = (self.request or {}).get("run")
            data = run.get("data") if isinstance(run, dict) else None
            if isinstance(data, dict) and any(str(each).startswith("job:") for each in data.values()):
                raise ValueError(f"request must have no run.data of a job: {NOT_SCHEDULED['run.files_of']}")
        elif self.cron or self.tz or self.overlap != "skip":
            raise ValueError(f"cron, tz and overlap must be left out with {self.act}")

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> ScheduleAsked:
        """Return what is asked by these decoded arguments. Raises `Refused`, which names the wrong field."""
        return asked_as(cls, arguments, "moorage schedule add --help")


class ScheduleRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A schedule as `ls` and `show` have it; times are ledger milliseconds, 0 for never."""

    name: str
    cron: str
    tz: str = ""
    overlap: Overlap = "skip"
    paused: bool = False
    since_ms: int = 0  # when it was added
    by: str = ""
    said: str = ""
    runs: int = 0  # how many jobs it has made
    skipped: int = 0  # how many runs made no job
    why: str = ""  # why the newest run made no job; "" if it made one
    job: str = ""  # the newest job
    state: str = ""  # its state, "" once it has left the scheduler's memory
    last_ms: int = 0  # when the newest run was decided
    due_ms: int = 0  # when it was due, if that was known; long before `last_ms` if it was made up after an outage
    next_ms: int = 0  # when the next run is due; 0 if paused, or if the scheduler's host lacks the time zone
    request: dict[str, Any] | None = None  # with `show` only


class ScheduleList(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The schedules of a tenant by name: the answer to the act `ls`."""

    schedules: list[ScheduleRow] = always(list[ScheduleRow])


class ScheduleDone(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to `add`, `pause`, `resume` and `remove`."""

    name: str
    changed: bool = always(bool)
    schedule: ScheduleRow = always(lambda: ScheduleRow(name="", cron=""))  # as it is now, or was before it was removed


class ScheduleRan(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to `run-now`."""

    name: str
    job: str  # the job that it made, also for a key that was used before
    changed: bool = always(bool)
