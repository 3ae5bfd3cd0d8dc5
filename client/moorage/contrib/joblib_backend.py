"""A backend for joblib, and so for scikit-learn: its tasks are calls of an `Executor`. Needs `joblib` here and there.

from moorage.contrib.joblib_backend import register

register()
with joblib.parallel_config("moorage", n_jobs=8, gpu="1xH100"):
    joblib.Parallel()(joblib.delayed(train)(lr) for lr in rates)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import joblib
from joblib.parallel import ParallelBackendBase

from moorage.client import CallFuture, Executor

#: calls at a time for `n_jobs=-1`: what a fleet has room for is decided by its scheduler
N_JOBS_ALL: Final = 32


def register() -> None:
    """Make the backend known to joblib as `moorage`."""
    joblib.register_parallel_backend("moorage", MoorageBackend)


class MoorageBackend(ParallelBackendBase):
    """Each batch of joblib is a call. Keywords of `parallel_config` and `Parallel` are those of `Executor`.

    `n_jobs` is the most calls at a time, 32 for -1; `executor` is one to use in place of one's own.
    """

    supports_retrieve_callback = True
    default_n_jobs = -1

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        executor: Executor | None = None,
        **options: Any,
    ) -> None:
        super().__init__(nesting_level, inner_max_num_threads)
        self._given = executor
        self._options = options
        self._own: Executor | None = None
        self._futures: set[CallFuture[Any]] = set()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many calls run at a time. Raises ValueError for 0."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 has no meaning: 1 or more, or -1 for as many as the fleet takes")
        return N_JOBS_ALL if n_jobs is None or n_jobs < 0 else n_jobs

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        """Open an executor for `n_jobs` calls at a time, and return that number."""
        self.parallel = parallel
        count = self.effective_n_jobs(n_jobs)
        if self._given is None and self._own is None:
            self._own = Executor(max_workers=count, **self._options)
        return count

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None) -> CallFuture[Any]:
        """Have a batch run, and return its future."""
        executor = self._given or self._own
        assert executor is not None
        future = executor.submit(func)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: CallFuture[Any]) -> Any:
        """Return what a batch returned, or raise what it raised."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel the batches that have not ended."""
        for future in list(self._futures):
            future.cancel()

    def terminate(self) -> None:
        """Close the executor that `configure` opened."""
        own, self._own = self._own, None
        if own is not None:
            own.shutdown()
