"""The checks of `moorage doctor`, in the order in which a person would ask."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from moorage.cli.doctor.check import failed
from moorage.cli.framework.options import TIMEOUT_DEFAULT, Options, whose_key
from moorage.client.durations import seconds
from moorage.client.view.checks import Check
from moorage.schemas.errors import MoorageError
from moorage.schemas.optional import need_server

#: roles of keys that people have
PEOPLE: Final = frozenset(("submitter", "operator", "observer"))


async def all_checks(options: Options) -> AsyncIterator[Check]:
    """Yield every check in the order in which a person would ask. If no server is known, only this host is checked.

    Raises `Rejected` if a flag is wrong.
    """
    from moorage.bus.own_fleets import own_fleet
    from moorage.bus.target import find_context
    from moorage.cli.doctor import checks_host as host
    from moorage.cli.doctor.checks_keys import of_keys
    from moorage.cli.doctor.checks_nats import of_nats
    from moorage.cli.doctor.checks_tls import of_site_certificates

    options = options.settled()
    seconds(options.timeout or TIMEOUT_DEFAULT)
    yield host.moorage()
    yield host.python()
    try:
        need_server("a scheduler or a worker")
    except MoorageError as error:  # nothing is wrong with it: it is a client
        yield Check("server", "ok", f"{error.problem.message}; to run one here: {error.problem.next}")
    else:
        of_host = (
            host.uvloop(),
            host.launcher(),
            host.users(),
            host.cgroup(),
            host.device_fence(),
            await host.nvml(),
            host.settings(),
        )
        for check in (
            *of_host,
            host.secrets(),
            # whoever asks with the key of a person runs no worker with these settings
            None if whose_key(options)[0] in PEOPLE else host.root_jobs(),
            await host.limiter(),
            host.mps(),
            host.huge_pages(),
            *await host.engines(),
        ):
            if check is not None:
                yield check
    try:
        context, _ = own_fleet(find_context(options.nats))
    except MoorageError as error:
        yield failed("context", error)
        return
    yield Check("context", "ok", f"{context.safe_url}, from {context.source or f'context {context.name}'}")
    async for check in of_nats(context, options):
        yield check
    async for check in of_keys():
        yield check
    async for check in of_site_certificates():
        yield check
