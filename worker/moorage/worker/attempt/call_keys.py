"""Give attempts that answer calls of a service, or make some, what they need: a key, the server, and their subject.

The key is the tenant's, in the worker's folder of secrets: `calls/<tenant>` answers, `callers/<tenant>` calls and does
nothing else. An attempt gets a copy of it in a file beside its own folder, which its user alone may read. A worker
whose own server asks for no key gives none.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from moorage.bus.call_key import CERTIFICATE, CREDS_VARIABLE, SUBJECT_VARIABLE, URL_VARIABLE, context_of_key
from moorage.bus.contexts import INBOX_VARIABLE, Context
from moorage.bus.own_login import Login
from moorage.schemas.codec import encode
from moorage.schemas.http_service import HTTP_VARIABLE, SLEEP_BY_VARIABLE
from moorage.schemas.roles import inbox
from moorage.schemas.service import (
    BATCH_VARIABLE,
    CALL_SECRETS,
    CALLER_OF_JOBS,
    CONCURRENCY_VARIABLE,
    GRACE_VARIABLE,
    INPUT_VARIABLE,
    OUTPUT_VARIABLE,
    QUEUE_VARIABLE,
    ServiceSpec,
)
from moorage.schemas.subjects import Subjects
from moorage.system.device_environment import JobEnvironment
from moorage.system.private_files import create_private
from moorage.worker.attempt.secret_files import SecretRefused, read_secret


class CallKeys:
    """What a worker gives to attempts that answer or make calls. `context` is its own connection; `url` is where jobs
    reach the server, if that is elsewhere. `own` is the login of a `moorage up`, for jobs of its one user, where no key
    is."""

    def __init__(
        self,
        context: Context,
        prefix: str,
        secrets_dir: Path | None,
        url: str | None = None,
        own: Login | None = None,
    ) -> None:
        self._own = own
        self._context = context
        self._own_url = ",".join(_without_login(server) for server in context.servers)
        self._url = url or self._own_url
        self.prefix = prefix
        self._subjects = Subjects(prefix)
        self._secrets_dir = secrets_dir
        self._needs_key = bool(any(context.login) or context.creds or context.nkey or context.cert or context.user_seed)

    def key(self, tenant: str, secrets: str = CALL_SECRETS) -> bytes | None:
        """Return the key of a tenant's services, or of its callers, by the folder of `secrets`; with the certificate of
        the servers' authority behind it if the worker itself trusts one. None if the server asks for neither. Raises
        SecretRefused."""
        key, authority = self._key(tenant, secrets), self._authority()
        return key if not authority or CERTIFICATE.encode() in (key or b"") else (key or b"") + authority

    def _authority(self) -> bytes:
        """Return the authority by which this worker trusts the servers, as it is now. Raises SecretRefused."""
        try:
            return Path(self._context.ca).read_bytes() if self._context.ca else b""
        except OSError:
            raise SecretRefused(CALL_SECRETS, "authority") from None

    def _key(self, tenant: str, secrets: str = CALL_SECRETS) -> bytes | None:
        folder = None if self._secrets_dir is None else self._secrets_dir / secrets
        if not self._has_key(tenant, secrets):
            if not self._needs_key:
                return None
            if self._own is not None:
                return msgspec.json.encode(self._own._asdict()) + b"\n"
        try:
            return read_secret(tenant, folder).encode() + b"\n"
        except SecretRefused as refused:
            raise SecretRefused(f"{secrets}/{tenant}", refused.fault) from None

    def context(self, tenant: str) -> Context:
        """Return how the worker itself connects as a member of this tenant's services. Raises SecretRefused,
        BadContext."""
        inbox_prefix, own = self._subjects.member_inbox(tenant), self._context
        if not self._has_key(tenant) and (not self._needs_key or self._own is not None):
            return msgspec.structs.replace(own, inbox_prefix=inbox_prefix)
        self._key(tenant)
        assert self._secrets_dir is not None, "a key has come from there"
        member = context_of_key(self._secrets_dir / CALL_SECRETS / tenant, self._own_url, inbox_prefix)
        return msgspec.structs.replace(member, ca=member.ca or own.ca, tls_first=own.tls_first)

    def _has_key(self, tenant: str, secrets: str = CALL_SECRETS) -> bool:
        return self._secrets_dir is not None and (self._secrets_dir / secrets / tenant).exists()

    def variables_of_caller(self, tenant: str, file: str | None) -> JobEnvironment:
        """Return the variables of an attempt that calls services; `file` is its copy of the key, None without one."""
        return JobEnvironment(
            {
                URL_VARIABLE: self._url,
                SUBJECT_VARIABLE: self._subjects.call(tenant, "*"),
                INBOX_VARIABLE: inbox("caller", f"{tenant}.{CALLER_OF_JOBS}"),
                **({} if file is None else {CREDS_VARIABLE: file}),
            }
        )

    def variables(self, tenant: str, service: ServiceSpec, grace_s: float, file: str | None) -> JobEnvironment:
        """Return the variables of an attempt; `file` is its copy of the key, None without one."""
        return JobEnvironment(
            {
                URL_VARIABLE: self._url,
                SUBJECT_VARIABLE: self._subjects.call(tenant, service.name),
                CONCURRENCY_VARIABLE: str(service.concurrency),
                GRACE_VARIABLE: f"{grace_s:g}s",
                INPUT_VARIABLE: str(service.input_bytes),
                OUTPUT_VARIABLE: str(service.output_bytes),
                **({} if service.batch is None else {BATCH_VARIABLE: str(service.batch)}),
                **({} if service.http is None else {HTTP_VARIABLE: encode(service.http).decode()}),
                **({} if service.sleep_by is None else {SLEEP_BY_VARIABLE: encode(service.sleep_by).decode()}),
                **({} if service.queue is None else {QUEUE_VARIABLE: str(service.queue)}),
                **({} if file is None else {CREDS_VARIABLE: file}),
            }
        )


def write_key(file: str, key: bytes, ids: tuple[int, int] | None) -> None:
    """Write a copy of a key, in place of an earlier one, for the user `ids`; None for the agent's own.

    Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)
    create_private(Path(file), key)
    if ids is not None:
        os.chown(file, *ids)


def _without_login(server: str) -> str:
    scheme, _, rest = server.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
