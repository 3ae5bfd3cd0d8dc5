"""Which jobs a word means: an id, the beginning of one, `last`, `all`, a pattern, or several with commas.

train-42      the job with this id, or, for verbs that change nothing, the only job whose id begins with it
=last         the job with exactly this id, even if it reads like one of the words below
last          the newest job
all           every job that has not ended
train-*-r1    every job whose id matches, * being any characters (in quotes: a shell expands *); cancel and change
              skip ended jobs
a,b,last      each of these

--label sweep=lr, --state queued   in place of words, or with all or a pattern: only jobs with this label, in this state

train-42/3    replica 3 of this job, for verbs with --replica, and for exec, shell, attach and forward

All of these are looked for in the scheduler's memory; a job that ended long ago is found by its whole id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

from moorage.cli.framework.arguments import JOBS_LISTED, Parameter
from moorage.cli.framework.console import print_err
from moorage.cli.framework.options import Options, Work, guarded, with_client
from moorage.client.errors import NotFound, not_found, rejected
from moorage.client.pages import pages
from moorage.schemas.job import QUEUED, STATES, TERMINAL
from moorage.schemas.names import ALL, EXACTLY, JOB_ID_DIGITS, LAST

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

EACH: Final = "*"
#: jobs that one answer lists
PAGE: Final = 1000
CANDIDATES_SHOWN_MAX: Final = 5
#: states of jobs that are not over, and of those among them that have begun
LIVE: Final = [state for state in STATES if state not in TERMINAL]
HELD: Final = [state for state in LIVE if state != QUEUED]

HELP: Final = "Ids, their beginnings, last, all, 'train-*-r1', or several with commas (moorage help jobs)."
HELP_ONE: Final = "The job's id, its beginning, or last; =ID means this exact id."
LISTED: Final = JOBS_LISTED
SomeReplicas: TypeAlias = Annotated[
    str | None, Parameter(help="Only these replicas, as in 7 or 0-9,205.", value="NUMBERS")
]

T = TypeVar("T")


@dataclass(frozen=True)
class Chosen:
    """The options that choose jobs by what they are, not by their names."""

    __group__: ClassVar[str] = "Which jobs"

    label: Annotated[
        list[str] | None, Parameter(help="Only jobs with this label; KEY alone: with any value.", value="KEY=VALUE")
    ] = None
    state: Annotated[
        list[str] | None,
        Parameter(help="Only jobs in these states, for example RUNNING or queued,running.", value="STATE"),
    ] = None

    @property
    def labels(self) -> dict[str, str]:
        """The labels that are asked for, `*` for any value. Raises `Rejected` for one without a key, or asked for with
        two values, which no job has."""
        found: dict[str, str] = {}
        for text in self.label or ():
            key, sign, value = text.partition("=")
            if not key or found.setdefault(key, value if sign else EACH) != (value if sign else EACH):
                why = f"--label names {key} with two values, and no job has both" if key else "--label names no label"
                fix = "choose by one, and by the other with another command" if key else "--label KEY=VALUE"
                raise rejected("invalid-argument", why, found=text, next=fix)
        return found

    @property
    def states(self) -> list[str]:
        return [name.upper().replace("-", "_") for some in self.state or () for name in some.split(",")]


ANY_JOB: Final = Chosen()


def words_of(texts: Sequence[str], chosen: Chosen = ANY_JOB) -> list[str]:
    """Return the comma-separated words of all arguments, in order, each once; [""] if options choose the jobs.

    Raises `Rejected` if there is none, or if options choose among words that name single jobs.
    """
    words = list(dict.fromkeys(word for text in texts for word in text.split(",") if word))
    if (one := next((word for word in words if "/" in word), None)) is not None:
        raise rejected(
            "invalid-argument", f"{one} names a replica, and here a job is named as a whole", found=one,
            allowed="JOB", next=f"write {one.partition('/')[0]}; verbs with --replica take {one} as their only job",
        )  # fmt: skip
    if chosen != ANY_JOB:
        single = next((word for word in words if word != ALL and EACH not in word), None)
        if single is not None:
            why = f"--label and --state choose among jobs, and {single} names one"
            raise rejected("invalid-argument", why, found=single, next="leave out the ids, or give a pattern")
        return words or [""]
    if not words:
        raise rejected("invalid-argument", "no job is named", next="name a job: last, all, or an id of moorage ls")
    return words


def replica_in(texts: Sequence[str], replica: str | int | None) -> tuple[Sequence[str], str | None]:
    """Return the words, and the replicas that are meant: those of --replica, or of a single JOB/N. Raises `Rejected`
    if both name some."""
    if len(texts) != 1 or "/" not in texts[0] or "," in texts[0]:
        return texts, None if replica is None else str(replica)
    name, number = replica_of(texts[0])
    if replica is not None:
        raise rejected(
            "invalid-argument", f"{texts[0]} and --replica {replica} both name replicas", found=texts[0],
            next="take one of them",
        )  # fmt: skip
    return [name], str(number)


def replica_of(word: str) -> tuple[str, int]:
    """Return the job's word and the replica of `JOB/REPLICA`; replica 0 without one. Raises `Rejected`."""
    name, slash, number = word.rpartition("/")
    if not slash:
        return word, 0
    if not (number.isascii() and number.isdecimal()):
        raise rejected(
            "invalid-argument", f"{number!r} is no replica", found=word, allowed="JOB or JOB/REPLICA, as train-42/3"
        )
    return name, int(number)


def with_named(
    options: Options, texts: Sequence[str], work: Work, chosen: Chosen = ANY_JOB, *, sends: bool = False
) -> int:
    """Do the same as `with_client`, but refuse words that name no job before a connection is made."""

    def act() -> int:
        words_of(texts, chosen)
        return with_client(options, work, sends=sends)

    return guarded(options, act)


async def ask_each(client: AsyncClient, texts: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> list[T]:
    """Return what `ask` answers for each job that the words mean. `ask` raises `NotFound` for an unknown id. Raises
    `NotFound`, `Rejected`."""
    answers: list[T] = []
    for word in words_of(texts):
        if means_several(word):
            answers += [await ask(name) for name in await _listed(client, word, ANY_JOB)]
        else:
            answers.append(await _ask_one(client, word, ask))
    return answers


async def ids_of(
    client: AsyncClient,
    texts: Sequence[str],
    chosen: Chosen = ANY_JOB,
    *,
    acts: bool = False,
    states: Sequence[str] = (),
) -> list[str]:
    """Return the ids that the words and options mean, each of an existing job; [] if `all` means none now.

    With `acts` the verb changes something: the beginning of an id that was chosen then stands for no other job. With
    `states` a pattern or option chooses only jobs in one of these. Raises `NotFound`, `Rejected`.
    """

    names: list[str] = []
    for word in words_of(texts, chosen):
        if not word or means_several(word):
            names += await _listed(client, word, chosen, states if word != LAST else ())
        else:
            names.append(await _ask_one(client, word, partial(_known, client), acts=acts))
    return list(dict.fromkeys(names))


async def one_id(client: AsyncClient, text: str, verb: str, *, acts: bool = False) -> str:
    """Return the one id that the word means; `acts` as in `ids_of`. Raises `NotFound`, and `Rejected` if it means
    several jobs or none."""
    names = await ids_of(client, [text], acts=acts)
    if len(names) != 1:
        raise rejected(
            "invalid-argument",
            f"{verb} takes one job, and {text} names {len(names)} jobs",
            found=text,
            next="name one job",
        )
    return names[0]


async def ids_to_cancel(client: AsyncClient, texts: Sequence[str], chosen: Chosen = ANY_JOB) -> list[str]:
    """Return the ids that the words and options mean. Unlike in `ids_of`, an id may be of a job that does not exist
    yet, and patterns and options choose only jobs that have not ended.

    So only an id that moorage made up may be given by its beginning. Any other name is taken literally: `cancel
    train-4` never ends `train-42`.
    """
    names: list[str] = []
    for word in words_of(texts, chosen):
        if not word or means_several(word):
            names += await _listed(client, word, chosen, LIVE if word != LAST else ())
        elif _begins_made_up(word):
            try:
                names.append(await _known(client, word))  # an id that was chosen, such as j1
            except NotFound:
                found = [name for name in await _begun(client, word) if _is_made_up(name)]
                names.append(_only(word, found) if found else word)
        else:
            names.append(client.job(word.removeprefix(EXACTLY)).job)
    return list(dict.fromkeys(names))


def means_several(word: str) -> bool:
    """Return whether the scheduler's list of jobs is needed to tell which jobs a word means."""
    return word in (LAST, ALL) or EACH in word


async def _known(client: AsyncClient, name: str) -> str:
    """Return the id if there is such a job. Raises `NotFound`."""
    await client.job(name).show()
    return name


async def _ask_one(client: AsyncClient, word: str, ask: Callable[[str], Awaitable[T]], *, acts: bool = False) -> T:
    try:
        return await ask(client.job(word.removeprefix(EXACTLY)).job)
    except NotFound:
        if word.startswith(EXACTLY):
            raise
        found = await _begun(client, word)
        if acts and found and not (_begins_made_up(word) and all(map(_is_made_up, found))):
            what = "a job whose id begins so" if len(found) == 1 else f"{len(found)} jobs whose ids begin so"
            fix = f"write the id in full: {', '.join(found[:CANDIDATES_SHOWN_MAX])}"
            raise not_found(f"no job {word} of tenant {client.tenant}, but {what}", job=word, next=fix) from None
        if not found:
            raise
    name = _only(word, found)
    print_err(f"{word} is job {name}, the only one whose id begins so")
    return await ask(name)


def _only(word: str, found: list[str]) -> str:
    if len(found) == 1:
        return found[0]
    shown = ", ".join(found[:CANDIDATES_SHOWN_MAX]) + (", …" if len(found) > CANDIDATES_SHOWN_MAX else "")
    raise rejected(
        "invalid-argument",
        f"{len(found)} jobs have ids that begin with {word}: {shown}",
        found=word,
        next=f"write more characters of the id, for example {found[0]}",
    )


async def _listed(client: AsyncClient, word: str, chosen: Chosen, states: Sequence[str] = ()) -> list[str]:
    """Return the ids that `last`, `all`, a pattern or "" means now, among what is `chosen`, and in these states.

    Raises `NotFound` if there is none, except for `all`.
    """
    if word == LAST:
        rows = (await client.ls(limit=1)).jobs
        if not rows:
            raise not_found(f"tenant {client.tenant} has no job", next="moorage submit creates a job")
        return [rows[0].job]
    wanted = [state for state in chosen.states or states if not states or state in states or state not in STATES]
    if word == ALL:
        wanted = wanted or LIVE
    found: list[str] = []
    if wanted or not chosen.states:  # else those that are chosen have ended
        ids = word if word not in ("", ALL) else ""
        found = await listed(client, {"ids": ids, "labels": chosen.labels, "states": wanted})
    if not found and word != ALL:
        lives = "that has not ended " if states else ""
        of = [f"has an id that matches {word!r}"] if word else []
        of += [f"has the label {text}" for text in chosen.label or ()]
        of += [f"is {' or '.join(chosen.states)}"] if chosen.states else []
        raise not_found(f"no job of tenant {client.tenant} {lives}{' and '.join(of)}", next="moorage ls")
    return found


async def listed(client: AsyncClient, asked: Mapping[str, Any]) -> list[str]:
    """Return the ids of all jobs in memory that a question of `ls` asks for, newest first, however many pages."""
    found: dict[str, None] = {}
    given = {name: value for name, value in asked.items() if value}
    async for page in pages(partial(client._wire.answer, "ls"), {**given, "limit": PAGE, "history": False}):
        found |= dict.fromkeys(row.job for row in page.jobs)
    return list(found)


async def _begun(client: AsyncClient, word: str) -> list[str]:
    """Return the ids of the jobs in memory that begin with a word."""
    return await listed(client, {"ids": word + EACH})


_MADE_UP_CHARS: Final = 15


def _is_made_up(name: str) -> bool:
    """Return whether an id has the form of those that moorage makes: see `client.job_ids.fresh_job_id`."""
    return len(name) == _MADE_UP_CHARS and _begins_made_up(name, at_most=_MADE_UP_CHARS)


def _begins_made_up(word: str, at_most: int = _MADE_UP_CHARS - 1) -> bool:
    return 1 < len(word) <= at_most and word[0] == "j" and set(word[1:]) <= set(JOB_ID_DIGITS)
