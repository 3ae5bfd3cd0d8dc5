"""Makes moorage's launcher known to Hydra, which looks for plugins in packages of this name alone."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from moorage.contrib.hydra_launcher import JobLauncher, LauncherConfig


class MoorageLauncher(JobLauncher):
    """`hydra/launcher=moorage`."""


ConfigStore.instance().store(group="hydra/launcher", name="moorage", node=LauncherConfig, provider="moorage")
