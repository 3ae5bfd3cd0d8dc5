"""The names of `moorage.client`: all there, each to be found, none of them twice."""

from __future__ import annotations

import subprocess
import sys

import moorage.client
from moorage.client import ClientError, errors


def test_every_error_of_the_sdk_has_its_name_where_all_names_are() -> None:
    """So that it can be caught."""
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ClientError)}
    assert kinds <= set(moorage.client.__all__)


def test_a_tab_completes_names_that_nobody_has_used_yet() -> None:
    asked = "import moorage.client; print(*dir(moorage.client))"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    assert set(moorage.client.__all__) <= set(told)


def test_each_name_is_of_one_module_and_is_there() -> None:
    assert sorted(moorage.client._MODULE_OF) == sorted(moorage.client.__all__)
    for name in moorage.client.__all__:
        assert getattr(moorage.client, name).__name__ == name
