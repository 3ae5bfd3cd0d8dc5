"""The pages of `moorage help TOPIC`, which are not about one verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.cli.framework.exit_codes import EXIT_CODES
from moorage.cli.framework.render import facts
from moorage.cli.habits import SBATCH


class Topic(NamedTuple):
    """A topic: its line in `moorage help` (`about`), and its page (`text`)."""

    about: str
    text: Callable[[], str]


def _exit_codes() -> str:
    return facts([(str(code), means) for code, means in EXIT_CODES.items()])


def _jobs() -> str:
    from moorage.cli.jobs import selectors

    return (selectors.__doc__ or "").partition("\n\n")[2].rstrip()


def _gpu() -> str:
    return facts(
        [
            ("--gpu", "one GPU, any model"),
            ("2xH100", "two H100 of one host, one exclusive lease each"),
            ("2xH100:80G", "with 80 GB each, as sold (80GB, 80GiB, too); 70000M is exact MiB"),
            ("H100|A100", "either model; a model is one or more whole words of the device's name, in any case"),
            ("~MI300", "also inside a word: an MI300X"),
            ("3x2xA100", "three replicas of two; --gang starts all or none, --spread goes for different hosts"),
            ("1xL40S@mps=50%", "a share of one GPU by mps; @time-slice, too; a memory share is 4G or 4GiB"),
            ("any", "moorage plan says what fits now; to an operator, moorage fleet shows what there is"),
        ]
    )


def _environment() -> str:
    return facts(
        [
            ("NATS_URL", "the server's address; it goes before that of any context, --nats before it"),
            ("NATS_CONTEXT", "the nats context to use; --nats overrides it (a URL, or a context's name)"),
            (
                "MOORAGE_HOME",
                "the folder of moorage up; else ./.moorage, which the other verbs find here and in folders below, and "
                "elsewhere where you run no other and nothing answers at port 4222",
            ),
            ("MOORAGE_TENANT", "the tenant, in place of that of the key; --tenant overrides it"),
            ("MOORAGE_INBOX_PREFIX", "the inbox that the user's permissions have; --inbox-prefix overrides it"),
            ("MOORAGE_LEDGER_URL_FILE", "a file with the ledger's URL, for moorage scheduler"),
            ("NO_COLOR", "no colour; --color overrides it"),
            ("CLICOLOR_FORCE", "colour in a pipe, too"),
            ("TERM=dumb", "no colour, and no line is rewritten"),
            ("COLUMNS", "the width to use instead of the terminal's"),
        ]
    )


def _sbatch() -> str:
    return facts(list(SBATCH))


TOPICS: Final[dict[str, Topic]] = {
    "exit-codes": Topic("How a verb ends, in numbers.", _exit_codes),
    "jobs": Topic("How to name jobs: ids, beginnings, last, all.", _jobs),
    "gpu": Topic("The word for GPUs: 2xH100:80G.", _gpu),
    "slurm": Topic("The options of sbatch, and those of submit.", _sbatch),
    "environment": Topic("The variables that moorage reads.", _environment),
}
