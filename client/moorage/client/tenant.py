"""Find the tenant of a client: the one given, that of its key, or the default."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from moorage.bus.contexts import Context

TENANT_VARIABLE: Final = "MOORAGE_TENANT"
TENANT_DEFAULT: Final = "default"


def find_tenant(
    tenant: str | None = None, env: Mapping[str, str] | None = None, target: Context | str | None = None
) -> str:
    """Return the tenant given, else $MOORAGE_TENANT, else the one whose key the context of `target` has, else
    `default`."""
    return named_tenant(tenant, env) or _keys_tenant(target, env) or TENANT_DEFAULT


def named_tenant(tenant: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Return the tenant given, else $MOORAGE_TENANT; empty if neither names one."""
    env = os.environ if env is None else env
    return tenant or env.get(TENANT_VARIABLE) or ""


def whose(inbox_prefix: str) -> tuple[str, str]:
    """Return the role and the name of the user whose context has this inbox; "" twice if the inbox does not say."""
    from moorage.schemas.roles import INBOX, ROLES

    first, role, name, *_ = [*inbox_prefix.split("."), "", ""]
    return (role, name) if first == INBOX and role in ROLES else ("", "")


def is_operators(context: Context | None) -> bool:
    """Return whether this context is that of an operator, who may not read what is a tenant's own: output, files."""
    return context is not None and whose(context.inbox_prefix)[0] == "operator"


def _keys_tenant(target: Context | str | None, env: Mapping[str, str] | None) -> str:
    """Return the tenant that may submit with this context's key; "" if it is no submitter's, or cannot be read."""
    from moorage.bus.target import find_context
    from moorage.schemas.errors import MoorageError

    with contextlib.suppress(MoorageError):  # told when the client connects
        role, name = whose(find_context(target, env).inbox_prefix)
        return name if role == "submitter" else ""
    return ""
