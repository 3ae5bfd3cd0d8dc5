"""`moorage forward`: a port of this machine that leads to a port of a running job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, word_here
from moorage.cli.framework.exit_codes import shell_code
from moorage.cli.framework.options import DEFAULTS, Options, with_client
from moorage.cli.jobs.exec import OneJob
from moorage.client.errors import rejected
from moorage.client.login import who

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

Port = Annotated[
    str, Parameter(help="The job's port, or LOCAL:PORT. PORT and PORT_1 are those of --ports.", value="[LOCAL:]PORT")
]


def forward(job: OneJob, port: Port, /, *, options: Options = DEFAULTS) -> int:
    """Lead a port of this machine to a port of a running job, until Ctrl-C or the job's end.

    It listens on 127.0.0.1 alone. The connections go through NATS to a relay in the job, which runs as a command does
    (moorage exec) by the job's python3, as its user, and ends with it. PORT is a number, or a variable of the job that
    has one, as PORT of --ports; LOCAL is the same number, or a free one.
    """

    async def work(client: AsyncClient) -> int:
        return await _forward(client, job, _ports(port))

    return with_client(options, work)


class Ports(NamedTuple):
    """A port here (0: a free one), and the job's as a number or a variable."""

    local: int
    remote: str


def _ports(word: str) -> Ports:
    """Return the ports of `[LOCAL:]PORT`. Raises `Rejected`."""
    local, colon, remote = word.rpartition(":")
    local = local if colon else remote if remote.isdecimal() else "0"
    if not local.isdecimal() or len(local) > 5:
        raise rejected(
            "invalid-argument", "PORT must name a port", found=word, allowed="1..65535, LOCAL:PORT, or PORT as a name",
            next="for example moorage forward JOB 8888, or 8080:PORT",
        )  # fmt: skip
    return Ports(int(local), remote)


async def _forward(client: AsyncClient, word: str, ports: Ports) -> int:
    from moorage.cli.jobs.selectors import one_id, replica_of

    name, replica = replica_of(word)
    job = await one_id(client, name, "forward", acts=True)
    asked = client.job(job).forward(ports.remote, local=ports.local, replica=replica, by=who())
    asked.on_said = lambda text: print_err(text.rstrip())
    async with asked as forward:
        print_err(f"http://{forward.address} leads to {ports.remote} of job {job}; Ctrl-C ends it")
        code = await forward.wait()
    print_err(f"the relay in job {job} is over: moorage show {word_here(job)} says how the job does")
    return shell_code(code)
