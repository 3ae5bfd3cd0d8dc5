"""Enforce what this worker lets tenants use: drivers, programs, secrets and users of the host.

The worker enforces its rules whatever the scheduler sends. It reports its rules about drivers to the scheduler, which
then sends no placement that would be refused. If a tenant may not use a driver, the worker refuses the placement, so
that the job goes to another worker. If a tenant may not use a program, secret or user, the attempt fails at once,
because another try here would fail the same way. Both errors name what was found and what is allowed, in the job's
events.
"""

from __future__ import annotations

import fnmatch
import os
import pwd
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from moorage.schemas.errors import Refused, refuse
from moorage.schemas.frames import NOT_PERMITTED, OTHERS
from moorage.schemas.job import Request, Run, Secret
from moorage.worker.attempt.attempt_folders import owner_ids

if TYPE_CHECKING:
    from moorage.worker.settings import WorkerSettings

#: most characters of rules in a join: a quarter of what its hello may take in the ledger
JOIN_CHARS_MAX: Final = 16 * 1024
_SHOWN_MAX: Final = 5
ROOT_OPEN: Final = "jobs may run as root: no other user is set for them, and a request may name any"
ROOT_FIX: Final = 'set run_as or run_as_for to another user, or root_jobs = "refuse"'
#: variables by which a request could make an allowed program load or find another one (ld.so(8), exec(3), iconv(1)), or
#: make an allowed script run another one first (bash(1))
_LOADING: Final = ("LD_", "TF_LD_", "TF_PREPEND_LD_", "GCONV_PATH", "BASH_ENV")
_FINDING: Final = ("PATH", "TF_PATH", "TF_PREPEND_PATH")


class Policy:
    """The rules of one worker. Made by `of`."""

    def __init__(
        self,
        drivers: Mapping[str, tuple[str, ...]],
        programs: Mapping[str, tuple[str, ...]],
        users: Mapping[str, str],
        user: str | None,
        secrets: Mapping[str, tuple[str, ...]],
        *,
        refuses_root: bool = False,
    ) -> None:
        self._drivers = drivers
        self._programs = programs
        self._secrets = secrets
        self._users = users
        self._user = user
        self._refuses_root = refuses_root

    @classmethod
    def of(cls, settings: WorkerSettings) -> Policy:
        return cls(
            {tenant: tuple(words.split()) for tenant, words in settings.drivers_for.items()},
            {tenant: tuple(words.split()) for tenant, words in settings.programs_for.items()},
            settings.run_as_for,
            settings.run_as,
            {tenant: tuple(words.split()) for tenant, words in settings.secrets_for.items()},
            refuses_root=settings.root_jobs == "refuse",
        )

    @property
    def changes_users(self) -> bool:
        return bool(self._users or self._user)

    @property
    def leaves_root_open(self) -> bool:
        """Whether processes of some tenant may run as root here: the agent is root, and no other user is set for it."""
        if os.geteuid() != 0 or self._refuses_root:
            return False
        if not self._users and self._user is None:
            return True
        # where users are set by tenant, one without a user is refused
        users = [*self._users.values(), *([self._user] if self._user and OTHERS not in self._users else [])]
        return any(map(_is_root, users))

    @property
    def leaves_secrets_open(self) -> bool:
        """Whether some rule differs by tenant, but every tenant may use every secret."""
        return bool(self._drivers or self._programs or self._users) and not self._secrets

    @property
    def has_programs(self) -> bool:
        """Whether some rule limits the programs that tenants may start."""
        return bool(self._programs)

    def check_host(self) -> None:
        """Raise `Refused` if this host cannot apply the rules; the agent calls it at its start."""
        if not self.changes_users:
            return
        if os.geteuid() != 0:
            raise refuse(
                "failed-precondition",
                "run_as and run_as_for need an agent that runs as root",
                field="$.run_as",
                found=f"uid {os.geteuid()}",
                next="run the agent as root, or remove these settings: jobs then run as the agent's own user",
            )
        users = [("run_as_for", user) for user in self._users.values()]
        for setting, user in (*users, *([("run_as", self._user)] if self._user else [])):
            if not user.isdecimal():
                try:
                    pwd.getpwnam(user)
                except KeyError:
                    raise refuse(
                        "failed-precondition",
                        f"{setting} names the user {user}, and this host has none of that name",
                        field=f"$.{setting}",
                        found=user,
                        next="name an existing user, or write a uid",
                    ) from None

    def drivers_by_tenant(self) -> dict[str, list[str]]:
        """Return the drivers that each tenant may use, for the join: no placement comes that would be refused.

        Programs and users stay here: they tell about this host. Empty without such rules, and if they would not fit a
        join.
        """
        if sum(len(tenant) + sum(map(len, words)) for tenant, words in self._drivers.items()) > JOIN_CHARS_MAX:
            return {}
        return {tenant: sorted(words) for tenant, words in self._drivers.items()}

    def mps_users(self) -> dict[str, int] | None:
        """Return a number per tenant for the join: tenants whose jobs run as the same user have the same number.

        Tenants that have the user of all others are left out, and so are tenants for which no user is set. None if it
        would not fit a join: then this worker finds out by itself which jobs may not share a GPU.
        """
        users = dict(self._users)
        if self._user is not None:
            users.setdefault(OTHERS, self._user)
        numbers: dict[int | None, int] = {}
        shown: dict[str, int] = {}
        for tenant, user in sorted(users.items()):
            ids = owner_ids(user)
            shown[tenant] = numbers.setdefault(ids and ids[0], len(numbers))
        others = shown.get(OTHERS)
        shown = {tenant: number for tenant, number in shown.items() if tenant == OTHERS or number != others}
        return shown if sum(map(len, shown)) <= JOIN_CHARS_MAX else None

    def check_placement(self, tenant: str, request: Request) -> None:
        """Raise `Refused` if the tenant may not use the request's driver on this worker."""
        if not self._drivers:
            return
        allowed = self._drivers.get(tenant, self._drivers.get(OTHERS, ()))
        driver = request.workload.driver
        if driver not in allowed:
            raise _not_permitted(f"tenant {tenant} may not have the driver {driver} on this worker", driver, allowed)

    def check_program(self, tenant: str, run: Run) -> None:
        """Raise `Refused` if this worker does not start this program for the tenant, or not as the requested user.

        If the tenant's programs are restricted, environment variables that could replace the program are refused too:
        those that load code (`LD_*`), and `PATH` for a program that is named without a slash.
        """
        self.check_user(tenant, run)
        if not self._programs:
            return
        allowed = self._programs.get(tenant, self._programs.get(OTHERS, ()))
        program = run.argv[0]
        if not any(_is(program, pattern) for pattern in allowed):
            raise _not_permitted(f"tenant {tenant} may not start {program} on this worker", program, allowed)
        for name in run.env:
            if name.startswith(_LOADING) or (name in _FINDING and "/" not in program):
                raise _not_permitted(
                    f"tenant {tenant} may not set {name} on this worker: it could make {program} another program",
                    name,
                    (),
                )

    def check_user(self, tenant: str, run: Run) -> None:
        """Raise `Refused` if this worker does not run the tenant's jobs, or not as the requested user.

        Where users are set by tenant and none is for this one, its jobs would run as the agent's own user, root.
        """
        user = self.user_of(tenant)
        if user is None and self._users:
            message = f"no user is set for jobs of tenant {tenant} on this worker (run_as, run_as_for)"
            raise _not_permitted(message, run.user or "no user", ())
        if user is not None and run.user not in (None, user):
            raise _not_permitted(f"jobs of tenant {tenant} run as {user} on this worker", str(run.user), (user,))

    def check_root(self, tenant: str, run: Run) -> None:
        """Raise `Refused` if a process of the tenant would run as root, and the settings refuse that."""
        user = self.user_of(tenant) or run.user
        if self._refuses_root and os.geteuid() == 0 and (user is None or _is_root(str(user))):
            raise refuse(
                "not-permitted",
                f"{NOT_PERMITTED}jobs of tenant {tenant} would run as root on this worker, and it refuses that",
                found=str(user or "no user"),
                next="name another user in the request (--user), or ask the operator of the worker to set run_as or"
                " run_as_for",
            )

    def check_secrets(self, tenant: str, env: Mapping[str, str | Secret]) -> None:
        """Raise `Refused` if the tenant may not use a secret that its request names, whether it exists or not."""
        if not self._secrets:
            return
        allowed = self._secrets.get(tenant, self._secrets.get(OTHERS, ()))
        for value in env.values():
            if isinstance(value, Secret) and not any(fnmatch.fnmatchcase(value.secret, each) for each in allowed):
                name = value.secret[:80]
                raise _not_permitted(f"tenant {tenant} may not have the secret {name} on this worker", name, allowed)

    def user_of(self, tenant: str) -> str | None:
        """Return the user that the tenant's jobs run as; None if no user is set for it.

        Then the request may name one (by default it is the agent's own), unless `check_user` refuses the tenant.
        """
        return self._users.get(tenant, self._users.get(OTHERS, self._user))


def _is_root(user: str) -> bool:
    """Return whether a user, by name or uid, is root; False for a name that this host does not know."""
    try:
        return (int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid) == 0
    except KeyError:
        return False


def _is(program: str, pattern: str) -> bool:
    """Return whether a program matches a pattern.

    A pattern with a slash matches whole paths without `..`; a pattern without a slash matches a bare name on the job's
    PATH.
    """
    if "/" in program and not (program.startswith("/") and os.path.normpath(program) == program):
        return False
    return ("/" in pattern) == ("/" in program) and fnmatch.fnmatchcase(program, pattern)


def _not_permitted(message: str, found: str, allowed: tuple[str, ...]) -> Refused:
    shown = ", ".join(allowed[:_SHOWN_MAX]) + (", …" if len(allowed) > _SHOWN_MAX else "")
    text = f"{NOT_PERMITTED}{message}" + (f" (allowed: {shown})" if allowed else "")
    return refuse("not-permitted", text, found=found, allowed=shown, next="ask the operator of the worker")
