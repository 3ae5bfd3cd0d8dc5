"""Nothing is skipped in CI but for want of a kube-apiserver, of a base image, or of a package that a test
downloads.

Any other tool that is missing there is a defect of `.ci/run`, not a reason.

Hooks of pytest; `tests/conftest.py` takes them over. CI is where the environment says `CI=true`, as `.ci/run` does.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("true", "1")


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"a skip is a failure in CI: {why}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    may_skip = hasattr(report, "wasxfail") or any(map(item.get_closest_marker, ("cluster", "image", "downloads")))
    if report.skipped and not may_skip and _in_ci():
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and _in_ci():
        _fail(report)
    return report
