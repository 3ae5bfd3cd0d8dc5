"""Find the tenant of a client: the one given, or the default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

TENANT_VARIABLE: Final = "MOORAGE_TENANT"
TENANT_DEFAULT: Final = "default"


def find_tenant(tenant: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Return the tenant given, else $MOORAGE_TENANT, else `default`."""
    return named_tenant(tenant, env) or TENANT_DEFAULT


def named_tenant(tenant: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Return the tenant given, else $MOORAGE_TENANT; empty if neither names one."""
    env = os.environ if env is None else env
    return tenant or env.get(TENANT_VARIABLE) or ""
