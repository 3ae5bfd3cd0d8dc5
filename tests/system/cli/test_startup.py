"""What a one-shot command does not import: start-up is most of its processor time (see `bench/cli.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLLOWING = {"moorage.client.follow.follower", "moorage.client.follow.watch"}
NOT_FOR_ONE_SHOT = {
    "aiohttp.client",
    "difflib",
    "moorage.bus.jetstream",
    *FOLLOWING,
    "moorage.scheduler",
    "moorage.worker",
    "uvloop",
}
NOT_WITHOUT_A_SERVER = {"argparse", "asyncio", "msgspec", "nats", *NOT_FOR_ONE_SHOT}


@pytest.mark.parametrize(
    ("line", "heavy"),
    [
        ("--version", NOT_WITHOUT_A_SERVER),
        ("ls --json --limit 3 --state RUNNING --nats {url} --timeout 1ms", NOT_FOR_ONE_SHOT),
        ("fleet --nats {url} --timeout 1ms", NOT_FOR_ONE_SHOT),
        ("cancel a,b --reason x --nats {url} --timeout 1ms", NOT_FOR_ONE_SHOT - FOLLOWING),
    ],
)
def test_what_is_not_needed_is_not_imported(line: str, heavy: set[str], nats_url: str) -> None:
    words = line.format(url=nats_url).split()
    script = (
        "import sys\n"
        "from moorage.cli import main, start\n"
        "def leave(code):\n"
        f"    print(sorted(name for name in {sorted(heavy)!r} if name in sys.modules), file=sys.stderr)\n"
        "    raise SystemExit(code)\n"
        "main.os._exit = leave\n"
        f"sys.argv = ['moorage', *{words!r}]\n"
        "start.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_the_sdk_has_imported_datetime_before_msgspec_does() -> None:
    """A script that is interrupted at its start ends by KeyboardInterrupt."""
    script = "import sys, moorage.client; print('datetime' in sys.modules, 'msgspec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_a_worker_runs_on_the_loop_and_with_the_collector_that_are_measured(nats_url: str, tmp_path: Path) -> None:
    """`moorage worker` ran on asyncio's own loop, and its collector walked over all that it had started with."""
    script = (
        "import asyncio, gc, os, signal, sys\n"
        "from moorage.cli import main\n"
        "from moorage.worker.agent.fleet_host import FleetHost\n"
        "async def serve(host, stop):\n"
        "    loop = type(asyncio.get_running_loop()).__module__\n"
        "    print(loop, gc.get_freeze_count() > 10_000, gc.get_threshold()[0] > 700, file=sys.stderr)\n"
        "FleetHost.serve = serve\n"
        f"sys.argv = ['moorage', 'worker', '--nats', {nats_url!r}, '--simulate', '1xH100', '--drivers', 'noop',\n"
        f"            '--state', {str(tmp_path)!r}]\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "uvloop True True", done.stderr
