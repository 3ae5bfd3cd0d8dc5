"""The table of verbs: the names, where each function is, and which verb a command line begins with.

A verb's module is imported only when the verb is run, so that `moorage --version` and short commands start quickly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple


class Verb(NamedTuple):
    """A verb: its name of one or two words, where its function is (`module:function`), and its line in the first
    help."""

    name: str
    where: str
    help: str

    def load(self) -> Callable[..., int | None]:
        """Import the verb's module and return its function."""
        module, _, function = self.where.partition(":")
        act: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return act


JOBS: Final = "Your jobs"
FLEET: Final = "The fleet"
RUNNING: Final = "Running moorage"
#: not in the first help, which has at most FIRST_HELP_MAX lines of verbs; `moorage help` shows it
LOOKUP: Final = "Looking things up"
FIRST_HELP_MAX: Final = 21

#: the verbs that run a scheduler or a worker, decide as a scheduler does, or divide a GPU; they need the extra `server`
OF_SERVER: Final = frozenset({"up", "scheduler", "worker", "demo", "simulate", "replay", "admin mig", "check worker"})

VERBS: Final[dict[str, tuple[Verb, ...]]] = {
    JOBS: (
        Verb("run", "moorage.cli.jobs.run:run", "Run a command on GPUs, follow it, return its exit code."),
        Verb("submit", "moorage.cli.jobs.submit:submit", "Submit a job; returns once it is in the ledger."),
        Verb("wait", "moorage.cli.jobs.wait:wait", "Wait until jobs have ended; exits with their code."),
        Verb("show", "moorage.cli.jobs.show:show", "Show jobs: request, state, all state changes."),
        Verb("ls", "moorage.cli.jobs.ls:ls", "Your jobs: what runs, waits, has ended."),
        Verb("logs", "moorage.cli.jobs.run:logs", "Follow a job's output until it has ended."),
        Verb("get", "moorage.cli.jobs.get:get", "Fetch the files that a job kept."),
        Verb("events", "moorage.cli.jobs.wait:events", "State changes as they happen, of a job or of the tenant."),
        Verb("explain", "moorage.cli.jobs.explain:explain", "Why a job waits, or what an error code means."),
        Verb("plan", "moorage.cli.jobs.plan:plan", "Whether, when and where a job would start; submits nothing."),
        Verb("cancel", "moorage.cli.jobs.cancel:cancel", "Cancel jobs, at any stage."),
        Verb("again", "moorage.cli.jobs.again:again", "Run jobs once more, or what of them failed."),
    ),
    FLEET: (
        Verb("fleet", "moorage.cli.fleet.workers:fleet", "Workers, what is free, what fits now."),
        Verb("drain", "moorage.cli.fleet.worker_acts:drain", "Empty a worker: nothing new, and its jobs end or leave."),
        Verb("cordon", "moorage.cli.fleet.worker_acts:cordon", "Place nothing new on a worker; its jobs go on."),
        Verb("uncordon", "moorage.cli.fleet.worker_acts:uncordon", "Undo drain or cordon."),
        Verb(
            "admin hold", "moorage.cli.fleet.admin:hold", "Keep waiting jobs, or a tenant's whole queue, from starting."
        ),
        Verb(
            "admin release",
            "moorage.cli.fleet.admin:release",
            "Undo hold; or put a worker's quarantined GPUs back to use.",
        ),
        Verb("admin mig", "moorage.cli.fleet.mig:mig", "Divide a GPU of this host into other MIG slices."),
        Verb("admin requeue", "moorage.cli.fleet.admin:requeue", "End running jobs and queue them again."),
        Verb("admin place", "moorage.cli.fleet.admin:place", "Start waiting jobs on a worker, also a cordoned one."),
        Verb("admin freeze", "moorage.cli.fleet.admin:freeze", "Suspend running jobs, their GPU memory in RAM."),
        Verb("admin resume", "moorage.cli.fleet.admin:resume", "Undo freeze."),
        Verb("admin time-limit", "moorage.cli.fleet.admin:time_limit", "Change the time limit of what runs of jobs."),
        Verb("admin priority", "moorage.cli.fleet.admin:priority", "Change the priority of jobs."),
        Verb("admin resize", "moorage.cli.fleet.admin:resize", "Change the part of shared GPUs that jobs have."),
        Verb("admin limit", "moorage.cli.fleet.admin:limit", "Limit a tenant's GPUs and jobs."),
        Verb("admin counter", "moorage.cli.fleet.admin:counter", "How many there are of licences and the like."),
        Verb(
            "admin feature-level",
            "moorage.cli.fleet.ledger:feature_level",
            "Show the leader and the standbys; raise the feature level.",
        ),
        Verb("admin trace", "moorage.cli.fleet.ledger:trace", "Write a trace of jobs and hosts from the ledger."),
        Verb("admin backup", "moorage.cli.fleet.ledger:backup", "Write the ledger as it is now to one file."),
        Verb(
            "admin restore",
            "moorage.cli.fleet.ledger:restore",
            "Make a new ledger from a backup; no scheduler may run.",
        ),
        Verb("admin share", "moorage.cli.fleet.admin:share", "Set a tenant's weight and guaranteed GPUs."),
        Verb(
            "admin tenants", "moorage.cli.fleet.admin:tenants", "Tenants, with what they use, their limits and holds."
        ),
        Verb("admin demand", "moorage.cli.fleet.admin:demand", "What the fleet lacks, and which hosts are idle."),
        Verb("admin forget", "moorage.cli.fleet.worker_acts:forget", "List workers no more that are gone."),
        Verb("admin acts", "moorage.cli.fleet.admin:acts", "Orders of operators: when, who, what and why."),
        Verb(
            "admin nats-config",
            "moorage.cli.fleet.nats_config:nats_config",
            "Accounts, permissions, a key for each user.",
        ),
        Verb("admin renew", "moorage.cli.fleet.renew:renew", "Certificates of a site, anew before they end."),
        Verb("admin token", "moorage.cli.fleet.tokens:token", "Secrets by which new machines of a pool get keys."),
        Verb("admin joiner", "moorage.cli.fleet.tokens:joiner", "Answer machines that have such a secret."),
        Verb("admin keys", "moorage.cli.fleet.keys:keys", "Each key of a site: whose, since when, and last seen."),
    ),
    RUNNING: (
        Verb("up", "moorage.cli.local.up:up", "Server, scheduler and worker on this machine, in one command."),
        Verb("scheduler", "moorage.cli.local.processes:scheduler", "Run a scheduler in the foreground."),
        Verb("worker", "moorage.cli.local.processes:worker", "Run a worker in the foreground."),
        Verb("demo", "moorage.cli.demo.verb:main", "A real trace on simulated GPUs; the scheduler is killed midway."),
        Verb("doctor", "moorage.cli.doctor.verb:doctor", "Check server, permissions, leader and this host."),
    ),
    LOOKUP: (
        Verb("sbatch", "moorage.cli.jobs.sbatch:sbatch", "What a script for Slurm is here; --submit submits it."),
        Verb("uncancel", "moorage.cli.jobs.cancel:uncancel", "Undo cancel --before: take these ids again."),
        Verb("change", "moorage.cli.jobs.change:change", "Change jobs in place: how many at once, priority, limit."),
        Verb("signal", "moorage.cli.jobs.signal:signal", "Send a signal to the processes of a running job."),
        Verb("follow", "moorage.cli.jobs.follow:follow", "Tell a command or a web address what becomes of jobs."),
        Verb("shell", "moorage.cli.jobs.exec:shell", "Open a shell in a running job."),
        Verb("attach", "moorage.cli.jobs.exec:attach", "Hold the terminal of a job of moorage run -it."),
        Verb("forward", "moorage.cli.jobs.forward:forward", "A port of this machine that leads into a running job."),
        Verb("exec", "moorage.cli.jobs.exec:exec_", "Run a command in a running job."),
        Verb("use", "moorage.cli.jobs.use:use", "What a running job uses of its GPUs, over ten minutes."),
        Verb("top", "moorage.cli.top.verb:top", "The whole fleet on one screen, live or once."),
        Verb("page", "moorage.cli.page.verb:page", "The whole fleet as a page for browsers."),
        Verb("door", "moorage.cli.door.verb:door", "Let clients of OpenAI's API, and any of HTTP, call services."),
        Verb("door key", "moorage.cli.door.key_verb:key", "Make, list and take back keys of the door's callers."),
        Verb("page logout", "moorage.cli.page.logout:logout", "Log every browser out of a page."),
        Verb("audit", "moorage.cli.fleet.audit:audit", "Compare ledger and workers; exit code 10 on drift."),
        Verb("metrics", "moorage.cli.fleet.metrics:metrics", "Metrics for Prometheus: printed once, or served."),
        Verb("usage", "moorage.cli.fleet.usage:usage", "GPU time of a tenant or of all, by model and hour."),
        Verb("policy test", "moorage.cli.study.policy:try_rules", "Whether the waits of a trace keep rules."),
        Verb("advise", "moorage.cli.fleet.advise:advise", "Which workloads ask for more memory than they use."),
        Verb("schedule add", "moorage.cli.jobs.schedule:add", "Submit a job again and again, by a cron."),
        Verb("schedule ls", "moorage.cli.jobs.schedule:ls", "Your schedules, with their newest runs."),
        Verb("schedule show", "moorage.cli.jobs.schedule:show", "One schedule: when, what, and its newest run."),
        Verb("schedule pause", "moorage.cli.jobs.schedule:pause", "Make no more runs, until resume."),
        Verb("schedule resume", "moorage.cli.jobs.schedule:resume", "Undo pause."),
        Verb("schedule run-now", "moorage.cli.jobs.schedule:run_now", "Make a run of a schedule at once."),
        Verb("schedule remove", "moorage.cli.jobs.schedule:remove", "Forget a schedule; its jobs stay."),
        Verb("dlq list", "moorage.cli.fleet.dlq:list_letters", "Queued requests that were refused, and why."),
        Verb("dlq show", "moorage.cli.fleet.dlq:show", "One of these requests, as it came."),
        Verb("dlq resend", "moorage.cli.fleet.dlq:resend", "Submit refused requests again, under their ids."),
        Verb("dlq drop", "moorage.cli.fleet.dlq:drop", "Delete refused requests for good."),
        Verb("lease", "moorage.cli.jobs.lease:lease", "Run a program of this host on GPUs that its worker lends."),
        Verb("services", "moorage.cli.jobs.services:services", "Live services: who answers, and how their calls do."),
        Verb("rollback", "moorage.cli.jobs.services:rollback", "Put a service's version before back in its place."),
        Verb("call", "moorage.cli.jobs.call:call", "Call a service once, and print its answer."),
        Verb(
            "check worker",
            "moorage.cli.local.check_worker:check_worker",
            "Whether a worker of another language keeps to the protocol.",
        ),
        Verb("serve", "moorage.cli.local.serve:serve", "Answer the calls of a service with a function or a program."),
        Verb("help", "moorage.cli.help:help", "Every verb, or one verb, or a topic."),
        Verb("simulate", "moorage.cli.study.simulate:simulate", "Run the scheduler on a trace, under a virtual clock."),
        Verb(
            "replay", "moorage.cli.study.replay:replay", "What was decided, from the ledger, a backup or a recording."
        ),
        Verb("errors", "moorage.cli.study.lookup:errors", "What each code means, and the exit codes."),
        Verb("add-path", "moorage.cli.local.add_path:add_path", "Run a command with what TF_PATH and its kin add."),
        Verb("mcp", "moorage.cli.study.mcp:mcp", "Tools for an agent, by the Model Context Protocol."),
        Verb("api", "moorage.cli.study.api:api", "Send one frame of the protocol, print its answer."),
        Verb("schema", "moorage.cli.study.lookup:schema", "The JSON Schema of the request, or of a frame."),
        Verb(
            "completion", "moorage.cli.completion:completion", "A script that completes verbs and options in a shell."
        ),
    ),
}


def all_verbs() -> dict[str, Verb]:
    """Return every verb by its name."""
    return {verb.name: verb for verbs in VERBS.values() for verb in verbs}


def find(words: Sequence[str]) -> tuple[Verb | None, list[str]]:
    """Return the verb with which the line begins, and the rest of the line; None and the whole line if there is
    none."""
    known = all_verbs()
    for count in (2, 1):
        verb = known.get(" ".join(words[:count])) if len(words) >= count else None
        if verb is not None:
            return verb, list(words[count:])
    return None, list(words)


def below(word: str) -> list[Verb]:
    """Return the verbs of two words that begin with this one."""
    return [verb for name, verb in all_verbs().items() if name.startswith(word + " ")]
