#!/usr/bin/env bash
# Behaviour: retry_if_not_exception_type (and retry_unless_exception_type) retries CancelledError: the cancelled task goes on and ends with something else.
# Versions: tenacity 9.2.1, CPython 3.11 to 3.13
# Guess: Cancellation is a BaseException and passes through, as it does with the default retry condition.
# Seen: With retry_if_not_exception_type(KeyError) the task makes all its attempts after cancel() and ends with RetryError; with retry_if_exception_type(ValueError) it ends as cancelled after one.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages tenacity==9.2.1
bounded 60 <<'EOF'
import asyncio

import tenacity
from findings.verdict import verdict


async def cancelled(retry):
    """Cancel a task in its first attempt; return how it ended, and after how many attempts."""
    attempts = 0
    began = asyncio.Event()

    async def work():
        nonlocal attempts
        attempts += 1
        began.set()
        await asyncio.sleep(0.2)
        raise ValueError

    tries = tenacity.AsyncRetrying(retry=retry, wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(3))
    task = asyncio.create_task(tries(work))
    await began.wait()
    task.cancel()
    try:
        await task
    except BaseException as error:
        return type(error).__name__, attempts


negative = asyncio.run(cancelled(tenacity.retry_if_not_exception_type(KeyError)))
positive = asyncio.run(cancelled(tenacity.retry_if_exception_type(ValueError)))
verdict(
    (negative, positive) == (("RetryError", 3), ("CancelledError", 1)),
    {"retry_if_not_exception_type": negative, "retry_if_exception_type": positive},
)
EOF
