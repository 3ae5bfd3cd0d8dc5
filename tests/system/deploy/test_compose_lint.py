"""deploy/compose.yml by compose-lint, which has OWASP's rules and those of the CIS Docker Benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tools.dist import ROOT

LINTER: Final = Path(sys.executable).parent / "compose-lint"
#: by rule: why it is left as it is
LEFT: Final = {
    "CL-0004": "moorage is the image that the reader has just made, of no release",
    "CL-0007": "Prometheus and Grafana write where their images say",
    "CL-0019": "a release has the digests, or tools.release refuses it",
    "CL-0026": "how much of a machine there is, its owner knows",
}


def test_nothing_is_found_but_what_is_left_with_a_reason(tmp_path: Path) -> None:
    if not LINTER.exists() and not os.environ.get("CI"):
        pytest.skip("compose-lint is not installed: make test installs it")
    rules = {rule: {"enabled": False, "reason": why} for rule, why in LEFT.items()}
    (tmp_path / "config.yml").write_text(json.dumps({"rules": rules}))
    linted = subprocess.run(
        [LINTER, "check", "--fail-on=low", "--strict-config", "--no-env", f"--config={tmp_path}/config.yml",
         str(ROOT / "deploy" / "compose.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert linted.returncode == 0, linted.stdout + linted.stderr
