"""Declare the settings of the driver kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from moorage.schemas.settings import setting
from moorage.worker.devices.readers.cdi import KINDS
from moorage.worker.drivers.container.config import ImageSettings
from moorage.worker.drivers.kubernetes.api import Cluster

_DIR_BYTES: Final = 10 << 30


class KubernetesSettings(ImageSettings, frozen=True):
    """Settings of the driver `kubernetes`. A job cannot change them, except the user if `request_user` is set."""

    node: Annotated[str, setting("Name of the worker's node; in a pod, spec.nodeName by the downward API. Needed.")] = (
        ""
    )
    namespace: Annotated[str, setting("Namespace of the pods; that of the kubeconfig or the service account.")] = ""
    kubeconfig: Annotated[
        Path | None,
        setting("Kubeconfig; else the service account of the pod that the agent runs in, KUBECONFIG, ~/.kube/config."),
    ] = None
    context: Annotated[str, setting("Context of the kubeconfig; its current one by default.")] = ""
    resource: Annotated[str, setting("Resource of the node whose units are the worker's GPUs.")] = KINDS["nvidia"]
    start_within: Annotated[
        float, setting("How long a pod may wait for its container, images included.", unit="s", ge=1, le=86400)
    ] = 600.0
    folder: Annotated[int, setting("Size of /work, on the node's disk.", unit="bytes", ge=1 << 20, le=1 << 44)] = (
        _DIR_BYTES
    )
    pull_secrets: Annotated[
        tuple[str, ...], setting("Secrets of the namespace with logins for registries (imagePullSecrets).")
    ] = ()
    runtime_class: Annotated[str, setting("RuntimeClass of the pods, such as nvidia; the cluster's default.")] = ""

    def connect(self) -> Cluster:
        """Return a client of the cluster, which has asked nothing yet. Raises Refused as `Cluster` does."""
        return Cluster(self.kubeconfig, self.context, self.namespace)
