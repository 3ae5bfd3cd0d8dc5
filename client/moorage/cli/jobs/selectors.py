"""Which jobs a word means: an id, the beginning of one, `last`, `all`, or several with commas.

train-42      the job with this id, or the only job whose id begins with it
=last         the job with exactly this id, even if it reads like one of the words below
last          the newest job
all           every job that has not ended
train-*       every job whose id begins with this (in quotes, because a shell expands *); cancel skips ended jobs
a,b,last      each of these
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from moorage.cli.framework.console import say
from moorage.schemas.job import STATES, TERMINAL

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

LAST: Final = "last"
ALL: Final = "all"
EXACTLY: Final = "="
EACH: Final = "*"
#: the newest jobs, among which a beginning is looked up
LOOKED_AT_MAX: Final = 1000
CANDIDATES_SHOWN_MAX: Final = 5
LIVE: Final = tuple(state for state in STATES if state not in TERMINAL)

HELP: Final = "Ids, their beginnings, last, all, 'train-*', or several with commas (moorage help jobs)."
HELP_ONE: Final = "The job's id, its beginning, or last; =ID means this exact id."
LISTED: Final = "ls --format {job}"

T = TypeVar("T")


def words_of(texts: Sequence[str]) -> list[str]:
    """Return the comma-separated words of all arguments, in order, each once. Raises `Rejected` if there is none."""
    words = list(dict.fromkeys(word for text in texts for word in text.split(",") if word))
    if not words:
        from moorage.client.errors import rejected

        raise rejected("invalid-argument", "no job is named", next="name a job: last, all, or an id of moorage ls")
    return words


async def ask_each(client: AsyncClient, texts: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> list[T]:
    """Return what `ask` answers for each job that the words mean. `ask` raises `NotFound` for an unknown id. Raises
    `NotFound`, `Rejected`."""
    answers: list[T] = []
    for word in words_of(texts):
        if _means_several(word):
            answers += [await ask(name) for name in await _listed(client, word)]
        else:
            answers.append(await _ask_one(client, word, ask))
    return answers


async def ids_of(client: AsyncClient, texts: Sequence[str]) -> list[str]:
    """Return the ids that the words mean, each of an existing job; [] if `all` means none now.

    Raises `NotFound`, `Rejected`.
    """

    async def known(name: str) -> str:
        await client.job(name).show()
        return name

    names: list[str] = []
    for word in words_of(texts):
        if _means_several(word):
            names += await _listed(client, word)
        else:
            names.append(await _ask_one(client, word, known))
    return list(dict.fromkeys(names))


async def one_id(client: AsyncClient, text: str, verb: str) -> str:
    """Return the one id that the word means. Raises `NotFound`, and `Rejected` if it means several jobs or none."""
    names = await ids_of(client, [text])
    if len(names) != 1:
        from moorage.client.errors import rejected

        raise rejected(
            "invalid-argument",
            f"{verb} takes one job, and {text} names {len(names)} jobs",
            found=text,
            next="name one job",
        )
    return names[0]


async def ids_to_cancel(client: AsyncClient, texts: Sequence[str]) -> list[str]:
    """Return the ids that the words mean. Unlike in `ids_of`, an id may be of a job that does not exist yet.

    So only an id that moorage made up may be given by its beginning. Any other name is taken literally: `cancel
    train-4` never ends `train-42`.
    """
    names: list[str] = []
    for word in words_of(texts):
        if word in (LAST, ALL):
            names += await _listed(client, word)
        elif word.endswith(EACH):
            names += await _begun(client, word, LIVE)
        elif _begins_made_up(word):
            found = [name for name in await _newest(client) if name.startswith(word) and _is_made_up(name)]
            names.append(_only(word, found) if found else word)
        else:
            names.append(client.job(word.removeprefix(EXACTLY)).job)
    return list(dict.fromkeys(names))


def _means_several(word: str) -> bool:
    """Return whether the scheduler's list of jobs is needed to tell which jobs a word means."""
    return word in (LAST, ALL) or word.endswith(EACH)


async def _ask_one(client: AsyncClient, word: str, ask: Callable[[str], Awaitable[T]]) -> T:
    from moorage.client.errors import NotFound

    try:
        return await ask(client.job(word.removeprefix(EXACTLY)).job)
    except NotFound:
        if word.startswith(EXACTLY):
            raise
        found = [name for name in await _newest(client) if name.startswith(word)]
        if not found:
            raise
    return await ask(_only(word, found))


def _only(word: str, found: list[str]) -> str:
    if len(found) == 1:
        return found[0]
    from moorage.client.errors import rejected

    shown = ", ".join(found[:CANDIDATES_SHOWN_MAX]) + (", …" if len(found) > CANDIDATES_SHOWN_MAX else "")
    raise rejected(
        "invalid-argument",
        f"{len(found)} jobs have ids that begin with {word}: {shown}",
        found=word,
        next=f"write more characters of the id, for example {found[0]}",
    )


async def _listed(client: AsyncClient, word: str) -> list[str]:
    """Return the ids that `last`, `all` or `begins-*` means now. Raises `NotFound` if there is none, except for
    `all`."""
    if word == LAST:
        rows = (await client.ls(limit=1)).jobs
        if not rows:
            from moorage.client.errors import not_found

            raise not_found(f"tenant {client.tenant} has no job", next="moorage submit creates a job")
        return [rows[0].job]
    if word.endswith(EACH):
        return await _begun(client, word)
    data = await client.ls(LIVE, LOOKED_AT_MAX)
    live = sum(number for state, number in data.counts.items() if state not in TERMINAL)
    if live > len(data.jobs):
        say(
            f"warning[selector]: all names only the newest {len(data.jobs)} of {live} jobs that have not ended; "
            "name the others by their ids, or run the command again once these have ended"
        )
    return [row.job for row in data.jobs]


async def _begun(client: AsyncClient, word: str, states: Sequence[str] = ()) -> list[str]:
    """Return the ids that begin as the word says. Raises `NotFound` if there is none."""
    data = await client.ls(states, LOOKED_AT_MAX)
    found = [row.job for row in data.jobs if row.job.startswith(word.removesuffix(EACH))]
    among = sum(number for state, number in data.counts.items() if not states or state in states)
    if among > len(data.jobs):
        say(
            f"warning[selector]: {word} was searched for only among the newest {len(data.jobs)} of {among} jobs"
            + (
                " that have not ended; run the command again once these have ended"
                if states
                else "; name older jobs by their ids"
            )
        )
    if not found:
        from moorage.client.errors import not_found

        begins = f"{'that has not ended ' if states else ''}has an id that begins with {word.removesuffix(EACH)!r}"
        raise not_found(f"no job of tenant {client.tenant} {begins}", next="moorage ls")
    return found


async def _newest(client: AsyncClient) -> list[str]:
    return [row.job for row in (await client.ls(limit=LOOKED_AT_MAX)).jobs]


_MADE_UP_CHARS: Final = 15


def _is_made_up(name: str) -> bool:
    """Return whether an id has the form of those that moorage makes: see `client.job_ids.fresh_job_id`."""
    return len(name) == _MADE_UP_CHARS and _begins_made_up(name, at_most=_MADE_UP_CHARS)


def _begins_made_up(word: str, at_most: int = _MADE_UP_CHARS - 1) -> bool:
    from moorage.schemas.names import JOB_ID_DIGITS

    return 1 < len(word) <= at_most and word[0] == "j" and set(word[1:]) <= set(JOB_ID_DIGITS)
