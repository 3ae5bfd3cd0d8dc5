"""Show a node's devices as slots: the cluster counts them, but does not name any.

The cluster chooses which device a pod gets, so a slot stands for one unit of the node's resource. Units that foreign
pods use, and units that the node does not offer now, are shown in the last slots without a pod of moorage.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import Device
from moorage.worker.devices.readers.base import DeviceProcess, Inventory, SlotReading
from moorage.worker.devices.readers.machine import DEVICES_MAX
from moorage.worker.drivers.kubernetes.api import Cluster, ClusterDown, ClusterError
from moorage.worker.drivers.kubernetes.pod import LABEL, SLOTS

#: seconds until the node is asked again, for all of its pods
LOOK_S: Final = 15.0
#: the vendor of a resource, by the start of its name
_VENDORS: Final = (("nvidia.com/", "nvidia"), ("amd.com/", "amd"), ("gpu.intel.com/", "intel"))
#: labels that the vendors' feature discovery sets on a node
_PRODUCT: Final = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "gpu.intel.com/product")
_MEMORY: Final = "nvidia.com/gpu.memory"
#: a quantity of Kubernetes, which writes 1000 as 1k; 18 figures are all that its largest number has room for
_QUANTITY: Final = re.compile(r"\+?([0-9]{1,18}\.?[0-9]{0,18}|\.[0-9]{1,18})(?:[eE]([+-]?[0-9]{1,2})|([a-zA-Z]{0,2}))")
_SCALES: Final = {
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate((*"num", "", *"kMGTPE"), -3)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}

log = logging.getLogger("moorage.worker")


def devices_of(node: Mapping[str, Any], resource: str) -> list[Device]:
    """Return a device for each unit of the resource that a node has, offered now or not, up to `DEVICES_MAX`."""
    labels = node["metadata"].get("labels") or {}
    vendor = next((name for begin, name in _VENDORS if resource.startswith(begin)), resource.partition(".")[0])
    name = next((labels[key] for key in _PRODUCT if key in labels), resource)
    memory = labels.get(_MEMORY, "")
    return [
        Device(
            index=slot,
            vendor=vendor,
            name=name.replace("-", " "),
            uuid=f"K8S-{node['metadata']['uid']}-{slot}",
            memory_mib=int(memory) if memory.isdecimal() else 0,
        )
        for slot in range(min(DEVICES_MAX, units(node["status"].get("capacity") or {}, resource)))
    ]


def units(counts: Mapping[str, Any], resource: str) -> int:
    """Return the number of units of a resource in a map of quantities, rounded up as Kubernetes does; 0 if it is
    missing, negative or no quantity."""
    found = _QUANTITY.fullmatch(str(counts.get(resource, "0")))
    if found is None:
        return 0
    number, exponent, suffix = found.groups()
    scale = _SCALES.get(suffix) if exponent is None else Decimal(f"1e{exponent}")
    return 0 if scale is None else math.ceil(Decimal(number) * scale)


def is_ready(node: Mapping[str, Any]) -> bool:
    """Return whether the node's kubelet answers, as the cluster sees it."""
    conditions = node["status"].get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def taken_slots(
    node: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], owner: str, resource: str, slots: int
) -> dict[int, str]:
    """Return what else uses each slot that is not free for moorage: a foreign pod by its name, or that the node lacks
    it.
    """
    ours: set[int] = set()
    others: list[str] = []
    for pod in pods:
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            continue
        metadata = pod["metadata"]
        if (metadata.get("labels") or {}).get(LABEL) == owner:
            words = (metadata.get("annotations") or {}).get(SLOTS, "").split(",")
            ours |= {int(word) for word in words if word.isdecimal()}
            continue
        asked = min(slots, _asked(pod["spec"], resource))  # a pod that no node admits may ask for any number
        others += [f"the pod {metadata.get('namespace')}/{metadata['name']}"] * asked
    status = node["status"]
    lacking = units(status.get("capacity") or {}, resource) - units(status.get("allocatable") or {}, resource)
    others += ["the node, which does not offer it now"] * min(slots, lacking)
    free = [slot for slot in reversed(range(slots)) if slot not in ours]
    return dict(zip(free, others, strict=False))


def _asked(spec: Mapping[str, Any], resource: str) -> int:
    """Return how many units a pod uses: its containers run together, its init containers before, one by one."""

    def of(key: str) -> list[int]:
        asked = ((each.get("resources") or {}).get("limits") or {} for each in spec.get(key) or ())
        return [units(limits, resource) for limits in asked]

    return max(sum(of("containers")), *of("initContainers"), 0)


class ClusterInventory(Inventory):
    """The devices of one node. If the node is not ready, its devices do not answer.

    `connect` opens the cluster; each reading opens and closes its own connection.
    """

    def __init__(self, connect: Callable[[], Cluster], node: Mapping[str, Any], owner: str, resource: str) -> None:
        self._connect = connect
        self._name = str(node["metadata"]["name"])
        self._owner = owner
        self._resource = resource
        self._devices = devices_of(node, resource)
        self._readings = [SlotReading() for _ in self._devices]
        self._asked_s = -LOOK_S

    def devices(self) -> list[Device]:
        return list(self._devices)

    async def sample(self) -> list[SlotReading]:
        """Return the readings, which are read again if the API server was last asked `LOOK_S` seconds ago.

        If it does not answer, return the last ones.
        """
        now_s = asyncio.get_running_loop().time()
        if self._devices and now_s >= self._asked_s + LOOK_S:
            self._asked_s = now_s
            try:
                node, pods = await self._ask()
            except (ClusterDown, ClusterError, MoorageError) as error:  # the last: a kubeconfig that is being written
                log.warning("the Kubernetes node %s cannot be read: %s", self._name, error)
                return self._readings
            if not is_ready(node):
                self._readings = [SlotReading(health="unresponsive") for _ in self._devices]
            else:
                taken = taken_slots(node, pods, self._owner, self._resource, len(self._devices))
                self._readings = [
                    SlotReading(processes=(DeviceProcess(0, taken[slot]),) if slot in taken else ())
                    for slot in range(len(self._devices))
                ]
        return self._readings

    async def _ask(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the node and its pods. Raises ClusterDown, ClusterError, and Refused if the kubeconfig is invalid."""
        cluster = self._connect()
        try:
            return await cluster.node(self._name), await cluster.pods_of_node(self._name)
        finally:
            await cluster.close()

    async def memory_is_free(self, slot: int) -> bool:
        """Return True: the kubelet takes a device back when its container ends, and that ends the attempt."""
        return True
