"""Run tests; what fails is run once more, alone: `python -m tests.again [pytest's arguments]`.

A test of real processes can be late where others take the processors. Both runs are shown. The status is 0 only if at
most two failed and each passed alone; `tests/system/README.md` lists those that were seen so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
#: so many failures of one run are no chance
FAILED_MAX: Final = 2
#: pytest's status where tests failed, and nothing else was wrong
EXIT_FAILED: Final = 1


def run(arguments: list[str]) -> int:
    """Return the status of pytest, or of the second run of those that failed in the first."""
    cache = ROOT / ".cache" / "again"
    failed = cache / "v" / "cache" / "lastfailed"
    failed.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}"]
    status = subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode
    if status != EXIT_FAILED or not failed.is_file():
        return status
    tests = sorted(json.loads(failed.read_text()))
    if len(tests) > FAILED_MAX:
        print(f"again: {len(tests)} tests failed, which is no chance: none is run again", flush=True)
        return status
    print(f"again: {len(tests)} failed beside others, and run once more alone: {' '.join(tests)}", flush=True)
    status = subprocess.run([*command, "-n", "0", "-v", *tests], cwd=ROOT, check=False).returncode
    verdict = "passed alone: add to tests/system/README.md what is known of it" if status == 0 else "failed alone, too"
    print(f"again: {verdict}: {' '.join(tests)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
