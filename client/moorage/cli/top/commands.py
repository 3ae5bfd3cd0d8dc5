"""The line behind `:` on the live screen: what its words mean, and what an operator's act does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from moorage.cli.top.draw import PANES, Target, Views
from moorage.client.view.view import View

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.operate import Done

#: acts on workers and on jobs; a job is named with its tenant, as vision/train-42
ON_WORKERS: Final = ("drain", "cordon", "uncordon")
ON_JOBS: Final = ("hold", "release")
WORDS: Final = "a job, a worker, a tenant, a part, at 14:03, now; with --operate: drain n07, hold vision/train-42"


class Act(NamedTuple):
    """What an operator asked for, to be done once the name was typed again."""

    verb: str
    name: str  # of the worker, or `tenant/job`
    why: str


class Command(NamedTuple):
    """What a line means; exactly one of these is given, `trouble` if it means nothing."""

    job: Target | None = None
    worker: str = ""
    tenant: str = ""
    pane: int = 0
    at: str = ""
    now: bool = False
    act: Act | None = None
    trouble: str = ""


def command_of(line: str, view: View) -> Command:
    """Return what a line means, with the names of this view. A beginning that only one of them has is enough."""
    words = line.split()
    if not words:
        return Command(trouble=f"name {WORDS}")
    first, rest = words[0], words[1:]
    if first == "now":
        return Command(now=True)
    if first == "at":
        return Command(at=" ".join(rest)) if rest else Command(trouble="name a time: at 14:03, at 2h (ago)")
    if first in (*ON_WORKERS, *ON_JOBS):
        return _act_of(first, rest, view)
    pane = next((number for number, name in PANES.items() if first in (str(number), name.split(",")[0])), 0)
    if pane:
        return Command(pane=pane)
    jobs = [Target(row.tenant, row.job) for row in view.jobs]
    tenants = sorted({each.tenant for each in jobs})
    exact_job = [each for each in jobs if first in (each.job, f"{each.tenant}/{each.job}")]
    workers = [worker.worker for worker in view.workers]
    if first in workers:
        return Command(worker=first)
    if len(exact_job) == 1:
        return Command(job=exact_job[0])
    if first in tenants:
        return Command(tenant=first)
    begun: list[Command] = [Command(worker=name) for name in workers if name.startswith(first)]
    begun += [
        Command(job=each)
        for each in jobs
        if each.job.startswith(first) or f"{each.tenant}/{each.job}".startswith(first)
    ]
    begun += [Command(tenant=name) for name in tenants if name.startswith(first)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        return Command(trouble=f"{len(begun)} jobs, workers and tenants begin with {first}: write more of it")
    return Command(trouble=f"no job, worker, tenant or part here is called {first}")


def command_in(line: str, views: Views) -> tuple[Command, str]:
    """Return what a line means, and of which of several fleets: the first one that has what it names."""
    found = [(command_of(line, view), name) for name, view in views] or [(Command(trouble="no fleet answers"), "")]
    return next((each for each in found if not each[0].trouble), found[0])


def _act_of(verb: str, rest: list[str], view: View) -> Command:
    if not rest:
        example = "n07" if verb in ON_WORKERS else "vision/train-42"
        return Command(trouble=f"{verb} what? {verb} {example}")
    name, why = rest[0], " ".join(rest[1:])
    if verb in ON_WORKERS:
        known = any(worker.worker == name for worker in view.workers)
        return Command(act=Act(verb, name, why)) if known else Command(trouble=f"no worker is called {name}")
    known = any(f"{row.tenant}/{row.job}" == name for row in view.jobs)
    return Command(act=Act(verb, name, why)) if known else Command(trouble=f"no job here is {name}: tenant/job")


async def perform(client: AsyncClient, act: Act) -> str:
    """Do what was asked for, and return what came of it. Raises `ClientError`."""
    done: Done
    if act.verb in ON_WORKERS:
        on_workers: dict[str, Callable[[], Awaitable[Done]]] = {
            "drain": lambda: client.fleet.drain(act.name, why=act.why),
            "cordon": lambda: client.fleet.cordon(act.name, why=act.why),
            "uncordon": lambda: client.fleet.uncordon(act.name, why=act.why),
        }
        done = await on_workers[act.verb]()
    else:
        tenant, _, job = act.name.partition("/")
        on_jobs = {"hold": client.admin.hold, "release": client.admin.release}
        done = await on_jobs[act.verb](job, tenant=tenant, why=act.why)
    return f"{act.verb} {act.name}: {'done' if done.changed else 'it was so already'}"
