"""List the built-in drivers: the ways in which a worker can run a job.

Each driver is a class derived from `moorage.worker.driver.Driver`, and one line here. A driver of another package has
its line in that package's own `pyproject.toml`: see `loading.GROUP`.
"""

from __future__ import annotations

from typing import Final

from moorage.schemas.capabilities import DRIVER_DEFAULT

#: the drivers that come with moorage, by name
BUILT_IN: Final = {
    DRIVER_DEFAULT: "moorage.worker.drivers.process.driver:ProcessDriver",
    "noop": "moorage.worker.drivers.noop:NoopDriver",
    "docker": "moorage.worker.drivers.container.docker:DockerDriver",
    "podman": "moorage.worker.drivers.container.podman:PodmanDriver",
    "kubernetes": "moorage.worker.drivers.kubernetes.driver:KubernetesDriver",
    "vm": "moorage.worker.drivers.vm.driver:VmDriver",
}
