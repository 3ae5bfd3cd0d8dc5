"""The launcher of Hydra's multirun: each of its jobs is a call of an `Executor`. Needs `hydra-core` here and there.

`hydra_plugins.moorage_launcher`, which comes with moorage, makes it known to Hydra as `hydra/launcher=moorage`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from moorage.client import Executor

log = logging.getLogger(__name__)


@dataclass
class LauncherConfig:
    """What `hydra.launcher.…` may set: `gpu`, `max_workers`, `python`, `target` and `tenant` as of `Executor`, and
    `fields`, what each job has beside, as `{limit: 1h, retries: 2}`."""

    _target_: str = "hydra_plugins.moorage_launcher.MoorageLauncher"
    gpu: Any = None
    max_workers: int | None = None
    python: str | None = None
    target: str | None = None
    tenant: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class JobLauncher(Launcher):
    """Runs the jobs of a multirun as one map, and returns once all have ended."""

    def __init__(
        self,
        gpu: Any = None,
        max_workers: int | None = None,
        python: str | None = None,
        target: str | None = None,
        tenant: str | None = None,
        fields: Any = None,
    ) -> None:
        plain: Any = OmegaConf.to_container(fields, resolve=True) if OmegaConf.is_config(fields) else fields
        self._options: dict[str, Any] = {
            "gpu": gpu, "max_workers": max_workers, "python": python or sys.executable, "target": target,
            "tenant": tenant, **(plain or {}),
        }  # fmt: skip

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives before a launch."""
        self.config = config
        self.hydra_context = hydra_context
        self.task_function = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a job for each list of overrides, and return what became of them, in their order.

        An exception of the task is raised where Hydra reads the value. What the task writes stays in the job's folder,
        unless `keep` among the fields names it. Raises what `Executor` and its futures raise.
        """
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        context, task, state = self.hydra_context, self.task_function, Singleton.get_state()

        def run(config: DictConfig) -> JobReturn:  # a closure travels by value: the host needs no moorage
            from hydra.core.singleton import Singleton as Single
            from hydra.core.utils import run_job
            from hydra.core.utils import setup_globals as set_up

            Single.set_state(state)
            set_up()
            return run_job(
                hydra_context=context,
                task_function=task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )

        configs: list[DictConfig] = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            log.info("\t#%s : %s", number, " ".join(filter_overrides(overrides)))
            config = context.config_loader.load_sweep_config(self.config, list(overrides))  # here are its files
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            configs.append(config)
        with Executor(**self._options) as executor:
            returned = list(executor.map(run, configs))
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        return returned
