"""Draws a `View` as lines of text for a terminal of any size: what `top --once` prints and what the live screen shows.

Several fleets are one picture: a line for each, and a column for the fleet in each part. It has no effect and asks no
terminal. A line is a list of pieces of text with a style each; the same state is always in
a word or a sign, too, so that nothing is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any, Final, NamedTuple

from msgspec import structs

from moorage.cli.framework.wrapping import columns_of, cut_off, fitting, padded
from moorage.cli.jobs.use import use_cell
from moorage.client.durations import age
from moorage.client.view.view import Fit, Idle, Trouble, View, Waiting, WorkerCells
from moorage.schemas.answers.jobs import JobRow
from moorage.schemas.cells import FOREIGN, FREE, LEASED, LOST, SICK
from moorage.schemas.frames import DISK_FULL, FailedLately, ServiceLately
from moorage.schemas.job import QUEUED
from moorage.schemas.printable import in_one_line
from moorage.schemas.units import many

Line = list[tuple[str, str]]
#: fleets by name, each with its view, or in words why it does not answer; where there is but one, its name is ""
Fleets = Sequence[tuple[str, "View | str"]]
#: those of them that answer
Views = Sequence[tuple[str, View]]


class Target(NamedTuple):
    """A job, by its tenant and id; of several fleets with its fleet."""

    tenant: str
    job: str
    fleet: str = ""


WRONG: Final = 1
WAITS: Final = 2
IDLE: Final = 3
FLEET: Final = 4
JOBS: Final = 5
PANES: Final = {WRONG: "wrong", WAITS: "waits", IDLE: "holds, unused", FLEET: "fleet", JOBS: "jobs"}
#: what a terminal of 80 columns and 24 rows shows; a larger one shows all
AT_FIRST: Final = frozenset({WRONG, WAITS, IDLE, FLEET})
#: from so many columns on, fleet and jobs stand beside the rest; from so many rows on there is room for the jobs
WIDE: Final = 140
HIGH: Final = 40
COLUMNS_MIN: Final = 40
ROWS_MIN: Final = 10
_GAP: Final = "  "
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
#: parts of the last hour
HOUR_CELLS: Final = 12
#: readings of a job's use in its row
SPARK_CELLS: Final = 10
#: a GPU that is leased and does nothing
UNUSED: Final = "_"
SIGNS: Final = "· free  ▁-█ use  # leased  _ unused  2-9 sharers  ! sick  x foreign  ? lost"
UNKNOWN: Final = "no fleet answers"
UNSEEN: Final = "not shown to this key"
#: behind the name of a worker, where there are many: its state
MARKS: Final = {
    **dict.fromkeys(("up", "claimed-locally"), " "),
    **dict.fromkeys(("lost", "stale", "not-heard"), "?"),
    "left": "-",
    **dict.fromkeys(("starts-fail", DISK_FULL), "!"),
}
#: so many workers have their state as a word
NAMED_MAX: Final = 16
#: so much of a fleet's name, in a table
NAME_CHARS: Final = 20
#: so many lines of workers are in the order of their names
#: from so many promised starts on, fewer kept than eight of ten stand out
PROMISES_SURE: Final = 20
IN_ORDER_MAX: Final = 12
#: signs of GPUs that somebody should look at
_ODD: Final = frozenset((SICK, FOREIGN, LOST))
_ASCII: Final = str.maketrans({FREE: ".", "─": "-", "…": "~", "→": ">", **dict.fromkeys(_BLOCKS, LEASED)})


def _uses(row: JobRow) -> int:
    return row.use.percent if row.use is not None else 101 if row.worker else 102


#: how the list of jobs may be sorted
SORTS: Final[dict[str, Callable[[JobRow], Any]]] = {
    "use": lambda row: (_uses(row), -row.age_ms),
    "wait": lambda row: (row.state != QUEUED, -row.age_ms),
    "run time": lambda row: 1 if row.ran_ms is None else -row.ran_ms,
    "age": lambda row: row.age_ms,
    "tenant": lambda row: (row.tenant, row.job),
    "worker": lambda row: (not row.worker, row.worker, row.job),
}


class Wishes(NamedTuple):
    """What the one at the screen has chosen. `panes` are the numbers of those that are shown; `cursor` is the job under
    the cursor. `live` says that keys are read, `sort` is one of `SORTS`, and `operates` says that acts are allowed."""

    panes: Collection[int] = AT_FIRST
    filter: str = ""
    cursor: Target | None = None
    ascii: bool = False
    live: bool = False
    sort: str = ""
    operates: bool = False


class Drawn(NamedTuple):
    """The lines, and the jobs that stand in them, from the top: where a cursor can be."""

    lines: list[Line]
    targets: list[Target]


class _Row(NamedTuple):
    line: Line
    target: Target | None = None


class _Pane(NamedTuple):
    number: int
    title: str
    heading: Line
    rows: list[_Row]


def panes_at_first(columns: int, rows: int) -> frozenset[int]:
    """Return the panes that a terminal of this size shows without a key."""
    return AT_FIRST | ({JOBS} if columns >= WIDE or rows >= HIGH else frozenset())


def draw(view: View, columns: int, rows: int, wishes: Wishes) -> Drawn:
    """Return at most `rows` lines of at most `columns` of a terminal; on the live screen, exactly so many."""
    return draw_all([("", view)], columns, rows, wishes)


def draw_all(fleets: Fleets, columns: int, rows: int, wishes: Wishes) -> Drawn:
    """Do the same for several fleets, of which one that does not answer is a line."""
    columns, rows = max(columns, COLUMNS_MIN), max(rows, ROWS_MIN)
    views = [(name, view) for name, view in fleets if isinstance(view, View)]
    several = len(fleets) > 1 or not views
    head = _head_of_all(fleets) if several else _head(views[0][1], columns, wishes)
    head = [_cut(line, columns) for line in head]
    foot = _cut(_foot(wishes), columns)
    room = rows - len(head) - 1
    numbers = sorted(wishes.panes)
    if (
        not several and views[0][1].own and (JOBS in wishes.panes or wishes.panes == AT_FIRST)
    ):  # the jobs of one tenant come first
        numbers = [JOBS, *(number for number in numbers if number != JOBS)]
    left = [number for number in numbers if number in (FLEET, JOBS)]
    right = [number for number in numbers if number not in left]
    targets: list[Target] = []
    if columns >= WIDE and left and right:
        half = (columns - 3) // 2
        beside = _column(views, right, half, room, wishes, targets)
        body = _beside(beside, _column(views, left, columns - half - 3, room, wishes, targets), half)
    else:
        body = _column(views, numbers, columns, room, wishes, targets)
    if wishes.live:  # its foot is at the bottom
        body += [[] for _ in range(room - len(body))]
    lines = [*head, *body[:room], foot]
    if wishes.ascii:
        lines = [[(text.translate(_ASCII), style) for text, style in line] for line in lines]
    return Drawn(lines, list(dict.fromkeys(targets)))


def as_text(line: Line) -> str:
    """Return a line without its styles."""
    return "".join(text for text, _ in line).rstrip()


# ------------------------------------------------------------------------------------------------- head and foot


def _head(view: View, columns: int, wishes: Wishes) -> list[Line]:
    tag: Line = []
    if view.simulated:
        tag = [
            ("sim", "bold"),
            (": all GPUs are simulated  " if view.simulated == "all" else ": some of the GPUs  ", ""),
        ]
    clock = datetime.fromtimestamp(view.at_ms / 1000, UTC).strftime("%H:%M:%S")
    first: Line = [
        ("moorage  ", "bold"),
        *tag,
        (f"leader {view.leader or 'unknown'}  epoch {view.epoch}  {clock} UTC", ""),
    ]
    if view.past:
        return _head_of_past(view, tag)
    if not view.sees_fleet:
        return [[*first[:1], *tag, (f"{clock} UTC", "")], *_hour(view.hour, columns), *_unseen(view, columns)]
    if view.heard_ms_ago is None:
        return [first, [("no frame of the leader was heard so far; two come a second", "")], *_verdict(view)]
    counts = view.counts
    shown = [f"{counts.gpus} GPUs", f"{counts.free} free", f"{counts.leased} leased"]
    if view.use is not None:
        shown.append(f"used {view.use} %")
    shown.append(f"{view.running} run, {view.queued} wait")
    shown += [f"{number} {name}" for name, number in counts.odd()]
    second: Line = [("  ".join(shown), "")]
    verdict = [] if WRONG in wishes.panes and view.troubles else _verdict(view)  # the part says it, line by line
    failed = [f"{each.tenant} {failed_words(each)}" for each in view.failed]
    calls = [f"{each.tenant}/{each.service} {service_words(each)}" for each in view.services]
    ill = "yellow" if view.services and view.services[0].errors else ""
    lately = [*_in_a_line("failed", failed, columns, "yellow"), *_in_a_line("calls/min", calls, columns, ill)]
    if any(view.promised):
        kept, missed, untold = view.promised
        said = f"starts promised: {kept} of {kept + missed} kept (9 of 10 asked), {untold} long waits not told"
        lately.append([(said, "yellow" if kept + missed >= PROMISES_SURE and 10 * kept < 8 * (kept + missed) else "")])
    lines = [first, second, *_hour(view.hour, columns), *_fits(view.fits, columns), *lately, *verdict]
    return lines + _unseen(view, columns)


def _head_of_all(fleets: Fleets) -> list[Line]:
    """Return a line for each of several fleets: its numbers and what is wrong, or why it does not answer."""
    header = ("FLEET", "GPUS", "FREE", "LEASED", "USED", "RUN", "WAIT", "WRONG")
    rows: list[tuple[list[Any], str, Target | None]] = []
    for name, view in fleets:
        if not isinstance(view, View):
            continue
        counts, first = view.counts, "".join(f"{each.where} {in_one_line(each.what)}" for each in view.troubles[:1])
        more = f"  (+{len(view.troubles) - 1} more)" if len(view.troubles) > 1 else ""
        numbers = [counts.gpus, counts.free, counts.leased, None if view.use is None else f"{view.use} %"]
        rows.append(([*_cell(name), *numbers, view.running, view.queued, first + more], "", None))
    heading, lines = _table(header, rows, header[1:-1])
    told = iter(lines)
    at_ms = max((view.at_ms for _, view in fleets if isinstance(view, View)), default=None)
    clock = "" if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC).strftime("  %H:%M:%S UTC")
    answering = f"{len(rows)} of {len(fleets)} fleets answer{clock}"
    return [
        [("moorage  ", "bold"), (answering, "")],
        *([heading] if rows else []),
        *(
            next(told).line if isinstance(view, View) else [(f"{_middle(name, NAME_CHARS)}{_GAP}{view}", "red")]
            for name, view in fleets
        ),
    ]


def _unseen(view: View, columns: int) -> list[Line]:
    """Return what this key does not show, in whole sentences: their ends say which key does."""
    lines = (line for what in view.unseen[:2] for line in wrap(f"not shown: {what}", columns, subsequent_indent=_GAP))
    return [[(line, "dim")] for line in lines]


def _head_of_past(view: View, tag: Line) -> list[Line]:
    then = datetime.fromtimestamp(view.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    first: Line = [("moorage  ", "bold"), *tag, (f"as it was at {then}", "reverse")]
    counts = view.counts
    words = [f"{counts.leased} of {counts.gpus} GPUs leased", f"{view.running} run, {view.queued} wait"]
    return [
        first,
        [(_GAP.join(words), "")],
        [(f"ended in the hour before: {view.ended_words}", "")],
        [("from the history alone: use and health of then are not known", "dim")],
    ]


def _hour(hour: Mapping[str, Sequence[float | None]], columns: int) -> list[Line]:
    """Return a line with the last hour of GPUs and of what waited, each up to its highest number; none without any."""
    words = []
    for what, row in hour.items():
        if known := [each for each in row if each is not None]:
            words.append(f"{what} {trend(row)} {known[-1]:.3g} of {max(known):.3g}")
    return _in_a_line("last hour", words, columns, "")


def trend(row: Sequence[float | None], cells: int = HOUR_CELLS) -> str:
    """Return numbers as blocks, the means of equal parts of the time; a blank where nothing is known."""
    most, each = max((value for value in row if value is not None), default=0) or 1, max(1, -(-len(row) // cells))
    parts = [[value for value in row[at : at + each] if value is not None] for at in range(0, len(row), each)]
    means = [sum(part) / len(part) if part else None for part in parts]
    return "".join(" " if mean is None else _BLOCKS[min(int(mean / most * 8), 7)] for mean in means)


def _fits(fits: Sequence[Fit], columns: int) -> list[Line]:
    """Return what fits now for each model, in as many lines as that takes, at most three."""
    words = [f"{most} ({free})" for most, free in fit_words(fits)] or ["nothing: no worker has a GPU"]
    lines, line = [], "fits now"
    for word in words:
        if len(line) + len(_GAP) + len(word) > columns and line.strip() != "fits now":
            lines.append(line)
            line = " " * len("fits now")
        line += _GAP + word
    lines.append(line)
    if len(lines) > 3:
        lines = [*lines[:2], lines[2][: columns - 2] + " …"]
    return [
        [("fits now", "bold"), (line[len("fits now") :], "")] if not at else [(line, "")]
        for at, line in enumerate(lines)
    ]


def fit_words(fits: Sequence[Fit]) -> list[tuple[str, str]]:
    """Return for each model the most that one job gets on one host, as `8xH100` or `no L40S`, and how many are free."""
    from moorage.cli.fleet.workers import model_words

    words = {**model_words([fit.model for fit in fits]), "": "GPU of any model"}
    most = [f"{fit.largest}x{words[fit.model]}" if fit.largest else f"no {words[fit.model]}" for fit in fits]
    return [(word, f"{fit.free} of {fit.gpus} free") for word, fit in zip(most, fits, strict=True)]


def _in_a_line(title: str, words: Sequence[str], columns: int, style: str) -> list[Line]:
    """Return a line with as many of the words as have room in it, and how many more there are; no line without any."""
    if not words:
        return []
    line = title
    for at, word in enumerate(words):
        left = len(words) - at - 1
        more = f"{_GAP}+{left} more" if left else ""
        if at and len(line) + len(_GAP) + len(word) + len(more) > columns:
            line += f"{_GAP}+{left + 1} more"
            break
        line += _GAP + word
    return [[(title, "bold"), (line[len(title) :], style)]]


def failed_words(failed: FailedLately) -> str:
    """Return how many jobs of a tenant failed in the last hour, and the last one: `3, train-42 TIMED_OUT 4m ago`."""
    return f"{failed.jobs}, {_middle(failed.job, 20)} {failed.state} {age(failed.age_ms)} ago"


def service_words(service: ServiceLately) -> str:
    """Return the calls of the last minute and what went wrong with them: `740 (3 failed) of 2 members`."""
    failed = f" ({service.errors} failed)" if service.errors else ""
    return f"{service.calls}{failed} of {many(service.members, 'member')}"


def _verdict(view: View) -> list[Line]:
    """Return the answer to the first question: is anything wrong?"""
    troubles = view.troubles
    if not troubles:
        return [[("nothing is wrong", "green")]] if view.heard_ms_ago is not None else []
    grave = sum(trouble.grave for trouble in troubles)
    first = troubles[0]
    style = "red" if grave else "yellow"
    more = f"  (+{len(troubles) - 1} more)" if len(troubles) > 1 else ""
    return [[(f"wrong: {first.where} {in_one_line(first.what)}{more}", style)]]


def _foot(wishes: Wishes) -> Line:
    if not wishes.live:
        return [(SIGNS, "dim")]
    said = f"filter {wishes.filter}  " if wishes.filter else ""
    keys = "  ".join(f"{number} {name.split(',')[0]}" for number, name in PANES.items())
    return [(said, "bold"), (f"{keys}  : go  / filter  ? help  q quit", "dim")]


# ---------------------------------------------------------------------------------------------------------- panes


def _column(
    views: Views, numbers: Sequence[int], columns: int, room: int, wishes: Wishes, targets: list[Target]
) -> list[Line]:
    """Return these panes below one another. What has no room is left out of the longest ones, and counted."""
    wanted = wishes.filter
    some = [
        (name, structs.replace(view, workers=[each for each in view.workers if matches(about(each), wanted)]))
        for name, view in views
    ]
    if any(view.past for _, view in views):  # what is in them was not kept
        numbers = [number for number in numbers if number not in (WRONG, IDLE)]
    elif not any(view.troubles or not view.sees_fleet for _, view in views):  # the head says that nothing is wrong
        numbers = [number for number in numbers if number != WRONG]
    panes = [_filtered(_MAKE[number](some, columns, wishes), wanted) for number in numbers]
    wants = [len(pane.rows) + bool(pane.rows and pane.heading) for pane in panes]
    room -= len(panes)
    first = min(wants[0], room // 2) if panes and panes[0].number == WRONG else 0  # what is wrong goes first
    given = [first, *shared_out(wants[1:], room - first)] if first else shared_out(wants, room)
    lines: list[Line] = []
    for pane, lot in zip(panes, given, strict=True):
        shown = pane.rows[: max(lot - bool(pane.heading), 0)]
        hidden = len(pane.rows) - len(shown)
        title = pane.title + (f", {hidden} not shown" if hidden else "")
        lines.append(_title(f"{pane.number} {title}", columns))
        if pane.rows and pane.heading and lot:
            lines.append(_cut([(text, "dim") for text, _ in pane.heading], columns))
        for row in shown:
            line = _cut(row.line, columns)
            if row.target is not None:
                targets.append(row.target)
                if row.target == wishes.cursor:
                    line = [(padded(as_text(line), columns), "reverse")]
            lines.append(line)
    return lines


def shared_out(wants: Sequence[int], room: int) -> list[int]:
    """Return how many of `room` lines each gets that wants so many: small wishes in full, the rest in equal parts."""
    given, left = [0] * len(wants), max(room, 0)
    while left and (open_ := [at for at, want in enumerate(wants) if given[at] < want]):
        for at in open_[:left]:
            given[at] += 1
            left -= 1
    return given


def _filtered(pane: _Pane, wanted: str) -> _Pane:
    """Return the pane with the rows that match the filter; of the fleet, the workers were chosen before."""
    if not wanted.strip("!"):
        return pane
    rows = pane.rows if pane.number == FLEET else [row for row in pane.rows if matches(as_text(row.line), wanted)]
    how = f"without {wanted[1:]}" if wanted.startswith("!") else f"with {wanted}"
    return pane._replace(rows=rows, title=f"{pane.title}; {how}: {len(rows)}" if pane.number != FLEET else pane.title)


def matches(text: str, wanted: str) -> bool:
    """Return whether the text has what is wanted, whatever its case; with `!` before it, whether it has it not."""
    inverse, word = wanted.startswith("!"), wanted.removeprefix("!").lower()
    return not word or (word in text.lower()) is not inverse


def about(worker: WorkerCells) -> str:
    """Return the text of a worker that a filter looks at."""
    return f"{worker.worker} {worker.state} {worker.model} {worker.cells}"


def _title(text: str, columns: int) -> Line:
    title = fitting(f"─ {text} ", columns)
    return [(title + "─" * (columns - columns_of(title)), "bold")]


def _beside(left: list[Line], right: list[Line], width: int) -> list[Line]:
    """Return two columns of lines as one; `width` is that of the left one."""
    lines = []
    for at in range(max(len(left), len(right))):
        first = left[at] if at < len(left) else []
        fill = width - sum(columns_of(text) for text, _ in first)
        lines.append([*first, (" " * fill + " │ ", "dim"), *(right[at] if at < len(right) else [])])
    return lines


def _cut(line: Line, columns: int) -> Line:
    found: Line = []
    left = columns
    for text, style in line:
        wide = columns_of(text)
        if wide > left:
            found.append((cut_off(text, left), style))
            break
        found.append((text, style))
        left -= wide
    return found


def _table(
    header: Sequence[str], rows: Sequence[tuple[Sequence[Any], str, Target | None]], numbers: Collection[str]
) -> tuple[Line, list[_Row]]:
    """Return header and rows in columns as wide as their cells; the last one is cut by who draws it. A row has its
    cells, its style and its job."""
    texts = [["-" if cell in (None, "") else in_one_line(str(cell)) for cell in cells] for cells, _, _ in rows]
    widths = [max(map(columns_of, column)) for column in zip(header, *texts, strict=True)]

    def line(cells: Sequence[str]) -> str:
        last = len(cells) - 1
        return _GAP.join(
            cell if at == last else padded(cell, width, right=name in numbers)
            for at, (cell, width, name) in enumerate(zip(cells, widths, header, strict=True))
        ).rstrip()

    found = [_Row([(line(cells), style)], target) for cells, (_, style, target) in zip(texts, rows, strict=True)]
    return [(line(header), "dim")], found


def _middle(text: str, width: int) -> str:
    """Return the text without its middle, if it is longer than `width`."""
    return text if len(text) <= width else f"{text[: width - width // 2 - 1]}…{text[-(width // 2) :]}"


def _in_words(views: Views, words: Callable[[View], str]) -> str:
    """Return what is said of each view, with its fleet's name where there are several."""
    return ", ".join(f"{name}: {words(view)}" if name else words(view) for name, view in views)


def _of_fleet(views: Views) -> tuple[str, ...]:
    """Return the columns before those of a table: that of the fleet, where there are several."""
    return ("FLEET",) if any(name for name, _ in views) else ()


def _cell(name: str) -> list[Any]:
    return [_middle(name, NAME_CHARS)] if name else []


def _wrong(views: Views, columns: int, wishes: Wishes) -> _Pane:
    def line(name: str, trouble: Trouble) -> Line:
        style = "red" if trouble.grave else "yellow"
        where = _GAP.join((*map(str, _cell(name)), trouble.where))
        return [(where, style), (f"{_GAP}{in_one_line(trouble.what)}", "")]

    rows = [_Row(line(name, trouble)) for name, view in views for trouble in view.troubles]
    grave = sum(trouble.grave for _, view in views for trouble in view.troubles)
    nothing = "nothing" if all(view.sees_fleet for _, view in views) else UNSEEN
    title = f"wrong: {len(rows) or nothing}" + (f", {grave} grave" if grave else "")
    return _Pane(WRONG, title, [], rows)


def _waits(views: Views, columns: int, wishes: Wishes) -> _Pane:
    def cells(row: Waiting) -> list[Any]:
        return [row.tenant, row.count, age(row.oldest_ms), _middle(row.job, 16), row.asks, row.starts, row.why]

    rows = [
        (_cell(name) + cells(row), "", Target(row.tenant, row.job, name))
        for name, view in views
        for row in view.waiting
    ]
    header = (*_of_fleet(views), "TENANT", "JOBS", "OLDEST", "JOB", "ASKS", "STARTS", "WHY THE OLDEST WAITS")
    heading, found = _table(header, rows, ("JOBS", "OLDEST", "STARTS"))
    return _Pane(WAITS, f"waits: {_in_words(views, waits_words) or UNKNOWN}", heading, found)


def waits_words(view: View, tenant: str = "") -> str:
    """Return how many jobs wait: of all tenants, or of one."""
    rows = [row for row in view.waiting if not tenant or row.tenant == tenant]
    listed = sum(row.jobs for row in rows)
    if tenant:
        among = sum(row.jobs for row in view.waiting)
        return (many(listed, "job") if listed else "nobody") + (f" of the oldest {among}" if view.waits > among else "")
    if not rows:
        return f"{many(view.queued, 'replica')}, of jobs that have begun or are not listed" if view.queued else "nobody"
    of = f"{many(max(view.waits, listed), 'job')} of {many(len({row.tenant for row in rows}), 'tenant')}"
    return of + (f", the oldest {listed} listed" if view.waits > listed else "")


def _idle(views: Views, columns: int, wishes: Wishes) -> _Pane:
    def cells(row: Idle) -> list[Any]:
        lasts = age(row.for_ms) if row.for_ms >= 1000 else "now"
        if not row.job:
            return ["-", "-", row.gpus, row.used, lasts, row.worker]
        return [row.tenant, row.jobs, row.gpus, row.used, lasts, f"{_middle(row.job, 20)} on {row.worker}"]

    rows = [
        (_cell(name) + cells(row), "", Target(row.tenant, row.job, name) if row.job else None)
        for name, view in views
        for row in view.idle
    ]
    header = (*_of_fleet(views), "TENANT", "JOBS", "GPUS", "USE %", "FOR", "LONGEST")
    heading, found = _table(header, rows, ("JOBS", "GPUS", "USE %", "FOR"))
    gpus = sum(row.gpus for _, view in views for row in view.idle)
    title = f"holds GPUs unused: {many(gpus, 'GPU') if rows else 'nobody, as far as use is read'}"
    return _Pane(IDLE, title, heading, found)


def _fleet(views: Views, columns: int, wishes: Wishes) -> _Pane:
    """Return the workers: one a line where there is room for the words, several a line where there are many."""
    every = [
        (f"{_middle(fleet, NAME_CHARS)} " if fleet else "", worker) for fleet, view in views for worker in view.workers
    ]
    name = _named if len(every) <= NAMED_MAX else _marked
    shown = [(worker, of + name(worker), _cells_of(worker)) for of, worker in every]
    name_width = max((len(called) for _, called, _ in shown), default=0)
    width = name_width + 1 + max((len(cells) for _, _, cells in shown), default=0) + len(_GAP)
    across = max((columns + len(_GAP)) // width, 1)
    down = -(-len(shown) // across)
    if down > IN_ORDER_MAX:  # they will hardly all have room: those with a trouble first, and read from left to right
        shown.sort(key=lambda each: each[0].state == "up" and not _ODD.intersection(each[0].cells))
        rows_of = [shown[at : at + across] for at in range(0, len(shown), across)]
    else:
        rows_of = [shown[at::down] for at in range(down)]
    rows = []
    for several in rows_of:
        line: Line = []
        for worker, called, cells in several:
            line += [(called.ljust(name_width), _style_of(worker)), (" " + cells.ljust(width - name_width - 1), "")]
        rows.append(_Row(line))
    no_worker = "no worker" if all(view.sees_fleet for _, view in views) else UNSEEN
    title = f"fleet: {many(len(shown), 'worker') if shown else no_worker}" + (
        ", all simulated" if views and all(view.simulated == "all" for _, view in views) else ""
    )
    return _Pane(FLEET, title, [], rows)


def _named(worker: WorkerCells) -> str:
    return worker.worker if worker.state == "up" else f"{worker.worker} {worker.state}"


def _marked(worker: WorkerCells) -> str:
    """Return the name with a sign for the state instead of the word, which would widen the whole column."""
    return worker.worker + MARKS.get(worker.state, "/")


def _style_of(worker: WorkerCells) -> str:
    return {"up": "", "left": "dim", "lost": "red", "starts-fail": "red", DISK_FULL: "red"}.get(worker.state, "yellow")


def _cells_of(worker: WorkerCells) -> str:
    """Return the signs, where a GPU with one job has its use instead: eight heights, `_` for none."""
    return "".join(
        sign if sign != LEASED or use is None else UNUSED if not use else _BLOCKS[min(use * 8 // 101, 7)]
        for sign, use in zip(worker.cells, worker.use, strict=True)
    )


def _jobs(views: Views, columns: int, wishes: Wishes) -> _Pane:
    has_sparks = any(view.sparks for _, view in views)

    def cells(view: View, row: JobRow) -> list[Any]:
        spark = _spark(view.sparks.get(f"{row.tenant}/{row.job}", ()), ascii=wishes.ascii)
        where = row.worker + (f" +{row.workers - 1}" if row.workers > 1 else "")
        return [
            row.tenant,
            _middle(row.job, 20),
            row.state,
            row.gpu,
            age(row.age_ms),
            use_cell(row.use),
            *([spark] if has_sparks else []),
            where or row.reason,
        ]

    by = wishes.sort or next(iter(SORTS))
    every = sorted(
        ((name, view, row) for name, view in views for row in view.jobs), key=lambda each: SORTS[by](each[2])
    )
    rows = [
        (_cell(name) + cells(view, row), "yellow" if row.state == QUEUED else "", Target(row.tenant, row.job, name))
        for name, view, row in every
    ]
    header = ("TENANT", "JOB", "STATE", "GPUS", "AGE", "USE", *(("LATELY",) if has_sparks else ()), "WORKER")
    heading, found = _table((*_of_fleet(views), *header), rows, ("AGE", "USE"))
    live = sum(view.live for _, view in views)
    listed = f", {len(rows)} listed" if live > len(rows) else ""
    title = f"jobs: {max(live, len(rows))}{listed}, by {by}" if rows else "jobs: none"
    return _Pane(JOBS, title, heading, found)


def _spark(readings: Sequence[int], *, ascii: bool) -> str:
    """Return the last readings as blocks of eight heights, or as digits of tenths of the whole."""
    lately = readings[-SPARK_CELLS:]
    if ascii:
        return "".join(UNUSED if not each else str(min(each // 10, 9)) for each in lately)
    return "".join(UNUSED if not each else _BLOCKS[min(each * 8 // 101, 7)] for each in lately)


_MAKE: Final[dict[int, Callable[[Views, int, Wishes], _Pane]]] = {
    WRONG: _wrong,
    WAITS: _waits,
    IDLE: _idle,
    FLEET: _fleet,
    JOBS: _jobs,
}
