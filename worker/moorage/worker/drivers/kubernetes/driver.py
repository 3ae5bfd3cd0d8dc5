"""Run pods: the worker of a node starts them on that node through the cluster's API, and the kubelet runs them.

Each node has one worker. An attempt is one pod, bound to the node and named after the attempt, so a start that is sent
twice starts one pod. A watch shows its state (kubernetes_verdict.py). A finalizer keeps a deleted pod in the cluster
until its end is in the ledger, so no end is missed, whatever is down meanwhile.

If a worker is cut off, only its agent ends its pods, and for that the agent must reach the API server: `fence` is none.
When such a worker is lost, its attempts are kept, and are not placed on another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Literal

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.driver_config import KubernetesBlock
from moorage.schemas.errors import MoorageError, refuse
from moorage.schemas.frames import LogPage, ReadLog
from moorage.schemas.job import Request
from moorage.system.backoff import Backoff
from moorage.worker.attempt.output_cleaner import OutputBounds
from moorage.worker.attempt.secret_files import secret_variables
from moorage.worker.devices.readers.base import Inventory
from moorage.worker.driver import CODE_LOST, Assignment, Driver, Living, kept_within
from moorage.worker.drivers.container.config import check_image, check_policy
from moorage.worker.drivers.container.faults import CannotStart, fault_of
from moorage.worker.drivers.container.output import LiveOutput
from moorage.worker.drivers.engine_watch import EngineWatch
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.kubernetes.api import CONFLICT, GONE, Cluster, ClusterDown, ClusterError
from moorage.worker.drivers.kubernetes.devices import ClusterInventory
from moorage.worker.drivers.kubernetes.output import PodOutputs
from moorage.worker.drivers.kubernetes.pod import (
    ENDS,
    FINALIZER,
    LABEL,
    attempt_of,
    check_request,
    exact_deadline_s,
    grace_s_of,
    owner_label,
    pod_name,
    pod_of,
    secret_of,
)
from moorage.worker.drivers.kubernetes.settings import KubernetesSettings
from moorage.worker.drivers.kubernetes.verdict import Seen, read, waited_s
from moorage.worker.drivers.supervisor_link import owner_of
from moorage.worker.session.attempt_messages import Ended, NotStarted, Started, StartFailed, Stuck
from moorage.worker.settings import WorkerSettings
from moorage.worker.start_codes import CODE_CANNOT_START

#: below the worker's state folder: the pods' output
FOLDER: Final = "kubernetes"
#: between two tries to reach the API server
RETRY_S: Final = 1.0
RETRY_S_MAX: Final = 30.0
#: how long after its grace a pod may still exist before its end is in doubt
STUCK_S: Final = 30.0
#: how long an API server may still carry out a request that it has not answered: a little more than its own time limit
LATE_S: Final = 65.0
#: pods that are created at the same time
STARTS_MAX: Final = 16
_BUSY: Final = 429
#: the pod that the driver asks for to see whether the API server and its store answer; no attempt has this name
_ASKED_FOR: Final = "moorage-ping"

log = logging.getLogger("moorage.worker")


class _Attempt:
    """An attempt from its placement until its end is reported."""

    def __init__(self, name: AttemptName) -> None:
        self.name = name
        self.is_sent = False
        """Whether the cluster may have its pod."""
        self.is_there = False
        """Whether the cluster has, or had, its pod."""
        self.has_secret = False
        self.is_started = False
        self.over = asyncio.Event()
        self.asked: tuple[float, str] | None = None
        """Grace and reason of the end that moorage has asked for."""
        self.given_up: Seen | None = None
        """What to report about a pod that is removed because it cannot start."""
        self.waits_for = ""
        self.tasks: set[asyncio.Task[None]] = set()
        self.timers: list[asyncio.TimerHandle] = []
        self.output: asyncio.Task[None] | None = None


class KubernetesDriver(Driver):
    """The driver `kubernetes`; see the module's docstring."""

    name = "kubernetes"
    settings = KubernetesSettings
    config = KubernetesBlock
    capabilities = Capabilities(
        keeps_output=True,
        ends_streams=True,
        outlives_agent=True,
        exec_instead="kubectl exec runs a command in the pod",
        fence="none",
    )

    @classmethod
    async def open_inventory(cls, worker: str, settings: WorkerSettings, own: Any) -> Inventory:
        """Return an inventory with a device for each unit of the node's resource. Raises Refused."""
        cluster = own.connect()
        try:
            node = await _node(cluster, own)
        finally:
            await cluster.close()
        return ClusterInventory(own.connect, node, owner_label(settings.prefix, worker), own.resource)

    @classmethod
    def from_kit(cls, kit: Kit) -> KubernetesDriver:
        return cls(kit)

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        own: KubernetesSettings = kit.own
        self._own = own
        self._kit = kit
        self._cluster = own.connect()
        self._owner = owner_label(kit.settings.prefix, kit.worker)
        self._selector = f"{LABEL}={self._owner}"
        self._attempts: dict[AttemptName, _Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: pods whose end is in the ledger, and that are still in the cluster
        self._over: dict[str, None] = {}
        self._dropping: asyncio.Task[None] | None = None
        self._starts = asyncio.Semaphore(STARTS_MAX)
        self._engine = EngineWatch(self._ping, (ClusterDown, ClusterError), f"{kit.worker}: kubernetes")
        settings = kit.settings
        self._outputs = PodOutputs(
            self._cluster,
            settings.state_dir / FOLDER,
            owner_of(kit.worker, self.name),
            OutputBounds(settings.output_keep, settings.output_bytes, settings.output_members),
            settings.output_cap_bytes,
            LiveOutput(self.publish, streams=settings.stream_output),
        )

    async def open(self) -> list[Living]:
        if not self._kit.simulated:
            await _node(self._cluster, self._own)
        try:
            pods, version = await self._cluster.list("pods", self._selector)
        except (ClusterDown, ClusterError) as error:
            raise _no_cluster(error) from None
        living: list[Living] = []
        found: list[tuple[_Attempt, dict[str, Any]]] = []
        for pod in pods:
            name, seen = attempt_of(pod), read(pod)
            if name is None:
                log.warning(
                    "the pod %s has the label of this worker, but is the pod of none of its jobs",
                    pod["metadata"]["name"],
                )
                continue
            if seen.is_over and seen.kind in ("refused", "failed"):
                phase = "refused" if seen.kind == "refused" or seen.mark else "exited"
                living.append(Living(name, phase, seen.code, seen.reason))
                continue
            attempt = self._attempts[name] = _Attempt(name)
            attempt.is_sent = attempt.is_there = attempt.has_secret = True
            # an end is reported once its output is read: until then the attempt counts as running
            attempt.is_started = seen.kind in ("running", "ended")
            living.append(Living(name, "running" if attempt.is_started else "starting"))
            found.append((attempt, pod))
        await self._outputs.open(self._attempts.keys())
        for attempt, pod in found:
            if attempt.is_started:
                self._follow(attempt)
            else:
                self._allow_start(attempt)
            self._on_pod(pod, is_gone=False)
        self._begin(self._engine.run())
        self._begin(self._watch(version))
        if self._kit.settings.secrets_dir is not None:
            self._begin(self._drop_secrets())
        return living

    async def close(self) -> None:
        tasks = set(self._tasks)
        for attempt in self._attempts.values():
            tasks |= attempt.tasks
            for timer in attempt.timers:
                timer.cancel()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._outputs.close()
        await self._cluster.close()

    def engine_down(self) -> tuple[str, float] | None:
        return (self._engine.why, self._engine.since_s) if self._engine.why else None

    async def _ping(self) -> None:
        try:
            await self._cluster.get("pods", _ASKED_FOR)
        except ClusterError as error:
            if error.status != _BUSY:  # a busy API server does answer
                raise

    def check(self, request: Request) -> None:
        check_image(request)
        check_request(request)

    def start(self, assignments: list[Assignment]) -> None:
        for assignment in assignments:
            attempt = self._attempts[assignment.name] = _Attempt(assignment.name)
            self._run(attempt, self._start(attempt, assignment))

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        attempt = self._attempts.get(name)
        if attempt is None or attempt.over.is_set():
            return
        attempt.asked = grace_s, "fence" if why == "fence" else "end"
        if attempt.is_sent:
            self._run(attempt, self._remove(attempt))

    def forget(self, names: list[AttemptName]) -> None:
        for name in names:
            attempt = self._attempts.pop(name, None)  # it is still here if an operator said that its devices are free
            for task in attempt.tasks if attempt is not None else ():
                task.cancel()
            self._drop_soon(pod_name(self._owner, name))

    def keeps(self, settings: WorkerSettings) -> dict[str, float]:
        return kept_within(self._outputs.keeper.bounds)

    async def read_log(self, ask: ReadLog) -> LogPage:
        name = name_in(ask)
        is_over = ask.ended_ms > 0 and name not in self._attempts
        return await self._outputs.page(name, ask, is_over, self._kit.worker)

    # -- inside: starting an attempt

    async def _start(self, attempt: _Attempt, assignment: Assignment) -> None:
        try:
            pod, secret = self._made(assignment)
            async with self._starts:
                await self._create(attempt, pod, secret)
        except CannotStart as refused:
            kind: Literal["refused", "failed"] = "refused" if refused.code is None else "failed"
            self._is_over(attempt, Seen(kind, str(refused), refused.code or 0, is_over=True, mark=refused.mark))
            return
        self._allow_start(attempt)
        if attempt.asked is not None:
            await self._remove(attempt)

    def _made(self, assignment: Assignment) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the pod of an attempt, and its Secret, None if it has no secrets. Raises CannotStart."""
        kit, own, run, tenant = self._kit, self._own, assignment.run, assignment.name[0]
        try:
            check_policy(tenant, assignment.request, own, kit.policy)
            kit.policy.check_secrets(tenant, run.env)
            hidden = secret_variables(run.env, kit.settings.secrets_dir)
            pod = pod_of(
                assignment, own, owner=self._owner, node=own.node, resource=own.resource,
                start_within_s=own.start_within, folder_bytes=own.folder, pull_secrets=own.pull_secrets,
                slots=tuple(device.index for device in assignment.devices),
                runtime_class=own.runtime_class, user=kit.policy.user_of(tenant) or run.user, simulated=kit.simulated,
            )  # fmt: skip
        except MoorageError as error:
            raise fault_of(error) from None
        return pod, secret_of(self._owner, assignment.name, hidden) if hidden else None

    async def _create(self, attempt: _Attempt, pod: dict[str, Any], secret: dict[str, Any] | None) -> None:
        """Create the pod in the cluster. Raises CannotStart once it is certain that the pod does not exist."""
        loop = asyncio.get_running_loop()
        until_s, trouble, in_doubt, sent_s = loop.time() + self._own.start_within, "", False, 0.0
        name = pod["metadata"]["name"]
        while True:
            if (attempt.asked is not None or loop.time() > until_s) and not attempt.is_sent:
                raise CannotStart(None, trouble or "it was asked to end before its start")
            try:
                if secret is not None:
                    await self._put("secrets", secret)
                if attempt.asked is not None or loop.time() > until_s:
                    if await self._cluster.get("pods", name) is not None:
                        attempt.is_there = attempt.has_secret = True
                        return
                    if not in_doubt or loop.time() > sent_s + LATE_S:
                        raise CannotStart(None, trouble or "it was asked to end before its start")
                    await asyncio.sleep(RETRY_S)
                    continue
                attempt.is_sent, sent_s = True, loop.time()
                made = await self._put("pods", pod)
            except ClusterDown as error:
                trouble, in_doubt = str(error), in_doubt or attempt.is_sent
            except ClusterError as error:
                trouble = f"the cluster refused the pod: {error}"
                if error.status in (400, 422):
                    raise CannotStart(CODE_CANNOT_START, trouble) from None
                in_doubt |= error.status >= 500 and attempt.is_sent
                # an earlier try may have succeeded, and a server that has just started forbids what it will allow later
                if error.status != _BUSY and error.status < 500 and not in_doubt:
                    raise CannotStart(None, trouble) from None
            else:
                break
            log.warning("%s: %s", attempt.name[1], trouble)
            await asyncio.sleep(RETRY_S)
        attempt.is_there = True
        if secret is not None:
            attempt.has_secret = True
            self._run(attempt, self._own_secret(name, made["metadata"]["uid"]))

    async def _put(self, kind: str, made: dict[str, Any]) -> dict[str, Any]:
        """Create an object and return it, or return the one that an earlier try has created.

        Raises ClusterDown, and ClusterError with `CONFLICT` if another object has its name.
        """
        try:
            return await self._cluster.create(kind, made)
        except ClusterError as error:
            if error.status != CONFLICT:
                raise
        found = await self._cluster.get(kind, made["metadata"]["name"])
        if found is None:
            raise ClusterError(_BUSY, "an object of this name has just been removed")
        for key in ("labels", "annotations"):
            wanted, there = made["metadata"].get(key, {}), found["metadata"].get(key) or {}
            if not wanted.items() <= there.items():
                raise ClusterError(CONFLICT, f"another object of {kind} has the name {made['metadata']['name']}")
        return found

    async def _own_secret(self, name: str, uid: str) -> None:
        """Let the cluster remove the Secret with its pod, in case the worker does not."""
        owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
        with contextlib.suppress(ClusterDown, ClusterError):
            await self._cluster.patch("secrets", name, {"metadata": {"ownerReferences": [owner]}})

    def _allow_start(self, attempt: _Attempt) -> None:
        self._at(attempt, self._own.start_within, self._too_late)

    def _too_late(self, attempt: _Attempt) -> None:
        if self._engine.why:  # the pod may have started, and its state cannot be read: begin the time anew
            self._allow_start(attempt)
        elif not attempt.is_started:
            why = f"the pod did not start within {self._own.start_within:g} s"
            self._give_up(attempt, Seen("refused", f"{why}: {attempt.waits_for}" if attempt.waits_for else why))

    def _give_up(self, attempt: _Attempt, seen: Seen) -> None:
        """Remove a pod that does not start; its failure is reported once it is gone."""
        if attempt.given_up is None and not attempt.over.is_set():
            attempt.given_up = seen
            self._run(attempt, self._remove(attempt))

    # -- inside: what the cluster shows

    async def _watch(self, version: str) -> None:
        loop, is_again = asyncio.get_running_loop(), False
        while True:
            began_s = loop.time()
            try:
                if is_again and version and is_older(await self._cluster.version("pods"), version):
                    log.warning("the Kubernetes cluster's store is older than before: its pods are listed again")
                    version = ""
                is_again = True
                if not version:
                    pods, version = await self._cluster.list("pods", self._selector)
                    listed = {pod["metadata"]["name"] for pod in pods}
                    for pod in pods:
                        self._on_pod(pod, is_gone=False)
                    for attempt in list(self._attempts.values()):
                        if attempt.is_there and pod_name(self._owner, attempt.name) not in listed:
                            self._run(attempt, self._look_for(attempt))
                async for kind, found in self._cluster.watch("pods", self._selector, version):
                    version = found["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        self._on_pod(found, is_gone=kind == "DELETED")
            except ClusterError as error:
                if error.status == GONE:
                    version = ""
                else:
                    log.warning("the pods of the Kubernetes cluster cannot be listed: %s", error)
            except ClusterDown as error:
                log.warning("%s", error)
            except Exception:  # a defect of moorage about one pod: the other pods must still be watched
                log.exception("reading the pods failed; the pods of the cluster are listed again")
                version = ""
            await asyncio.sleep(max(0.0, began_s + RETRY_S - loop.time()))  # some proxies end a watch at once

    async def _look_for(self, attempt: _Attempt) -> None:
        """Ask for the pod by name, and report the attempt as stuck if it is gone.

        A list from before the pod's creation lacks it, so a missing entry proves nothing.
        """
        while not attempt.over.is_set():
            with contextlib.suppress(ClusterDown, ClusterError):
                if await self._cluster.get("pods", pod_name(self._owner, attempt.name)) is None:
                    self._vanished(attempt)
                return
            await asyncio.sleep(RETRY_S)

    def _on_pod(self, pod: Mapping[str, Any], *, is_gone: bool) -> None:
        name = attempt_of(pod)
        attempt = self._attempts.get(name) if name is not None else None
        if name is None:
            return
        if attempt is None:
            if not is_gone:
                self._drop_stray(pod)
            return
        if attempt.over.is_set():
            return
        seen = read(pod)
        attempt.waits_for = seen.why if seen.kind == "waiting" and seen.why else attempt.waits_for
        if seen.is_over:
            self._is_over(attempt, seen)
        elif is_gone:
            self._vanished(attempt)
        elif seen.kind == "failed":
            self._give_up(attempt, seen)
        elif seen.kind == "running" and attempt.given_up is None:
            self._is_running(attempt, pod)

    def _drop_stray(self, pod: Mapping[str, Any]) -> None:
        """Remove a pod that was created so late that nobody waits for it: the agent before has sent the request."""
        at = pod["metadata"]["name"]
        if at not in self._over and "deletionTimestamp" not in pod["metadata"] and not read(pod).is_over:
            log.error("the pod %s is of none of this worker's jobs: it is removed", at)
            self._drop_soon(at)

    def _vanished(self, attempt: _Attempt) -> None:
        log.error(
            "job %s: its pod was deleted from the cluster, but the kubelet has not reported its end: the job may "
            "still run."
            " Its devices stay out of use until an operator releases them: moorage admin release --worker",
            attempt.name[1],
        )  # fmt: skip
        self.report(Stuck([attempt.name]))

    def _is_running(self, attempt: _Attempt, pod: Mapping[str, Any]) -> None:
        if not attempt.is_started:
            attempt.is_started = True
            self.report(Started([attempt.name]))
            self._follow(attempt)
        name, exact_s = pod["metadata"]["name"], exact_deadline_s(pod, waited_s(pod))
        if exact_s is not None:
            change = {"spec": {"activeDeadlineSeconds": exact_s}}
            self._run(attempt, self._until_done(attempt, lambda: self._cluster.patch("pods", name, change)))
        if attempt.has_secret:
            attempt.has_secret = False
            self._run(attempt, self._until_done(attempt, lambda: self._drop_secret(name)))

    def _follow(self, attempt: _Attempt) -> None:
        name = pod_name(self._owner, attempt.name)
        attempt.output = self._run(attempt, self._outputs.follow(attempt.name, name, attempt.over))

    def _is_over(self, attempt: _Attempt, seen: Seen) -> None:
        for timer in attempt.timers:
            timer.cancel()
        if seen.kind == "ended" and seen.began and not attempt.is_started:
            attempt.is_started = True
            self.report(Started([attempt.name]))
            self._follow(attempt)
        attempt.over.set()
        self._begin(self._report_end(attempt, seen))

    async def _report_end(self, attempt: _Attempt, seen: Seen) -> None:
        """Report an end, once the output has been published."""
        if attempt.output is not None:
            await asyncio.wait((attempt.output,))
        name = attempt.name
        self._attempts.pop(name, None)
        if not attempt.is_started:
            seen = attempt.given_up or seen
        why = seen.reason
        if attempt.asked is not None and not attempt.is_started:
            self.report(Ended([(name, CODE_LOST, attempt.asked[1])]))
        elif (seen.kind == "refused" or seen.mark) and not attempt.is_started:
            self.report(NotStarted([(name, why)], seen.code))
        elif seen.kind == "failed" and not attempt.is_started:
            self.report(StartFailed([(name, seen.code, why)]))
        elif seen.kind == "ended":
            self.report(Ended([(name, seen.code, seen.why)]))
        else:
            self.report(Ended([(name, CODE_LOST, "lost")]))

    # -- inside: ending an attempt, and clearing up after it

    async def _remove(self, attempt: _Attempt) -> None:
        """Ask the cluster to end a pod. The watch shows the end; the cluster's answer does not.

        If the end is not seen `STUCK_S` seconds after the grace, the attempt is reported as stuck.
        """
        name = pod_name(self._owner, attempt.name)
        grace_s, why = attempt.asked or (1.0, "lost")
        self._at(attempt, grace_s_of(grace_s) + STUCK_S, self._in_doubt)
        note = {"metadata": {"annotations": {ENDS: why}}}
        await self._until_done(attempt, lambda: self._cluster.patch("pods", name, note))
        await self._until_done(attempt, lambda: self._cluster.delete("pods", name, grace_s_of(grace_s)))

    def _in_doubt(self, attempt: _Attempt) -> None:
        if not attempt.over.is_set():
            log.error("job %s: its pod was asked to end, but the kubelet has not reported the end", attempt.name[1])
            self.report(Stuck([attempt.name]))

    def _drop_soon(self, name: str) -> None:
        self._over[name] = None
        if self._dropping is None:
            self._dropping = self._begin(self._drop_all())

    async def _drop_all(self) -> None:
        """Remove everything of attempts whose end is in the ledger from the cluster."""
        backoff = Backoff(RETRY_S, RETRY_S_MAX)
        while self._over:
            name = next(iter(self._over))
            try:
                await self._drop(name)
            except (ClusterDown, ClusterError) as error:
                log.warning("ended pods cannot be deleted from the cluster: %s", error)
                self._over[name] = self._over.pop(name)  # try the other pods first
                await asyncio.sleep(backoff.next_s())
            else:
                del self._over[name]
                backoff.reset()
        self._dropping = None

    async def _drop(self, name: str) -> None:
        pod = await self._cluster.get("pods", name)
        if pod is not None:
            kept = [each for each in pod["metadata"].get("finalizers") or () if each != FINALIZER]
            await self._cluster.patch("pods", name, {"metadata": {"finalizers": kept}})
            await self._cluster.delete("pods", name)
        await self._drop_secret(name)

    async def _drop_secret(self, name: str) -> None:
        if self._kit.settings.secrets_dir is not None:
            await self._cluster.delete("secrets", name)

    async def _drop_secrets(self) -> None:
        """Remove the Secrets that belong to no attempt here, now and once the last request of an earlier agent cannot
        make one any more."""
        await self._drop_left_secrets()
        await asyncio.sleep(LATE_S)
        await self._drop_left_secrets()

    async def _drop_left_secrets(self) -> None:
        try:
            secrets, _ = await self._cluster.list("secrets", self._selector)
            for secret in secrets:
                name = secret["metadata"]["name"]
                if not any(pod_name(self._owner, each) == name for each in self._attempts):
                    await self._drop_secret(name)
        except (ClusterDown, ClusterError) as error:
            log.warning("Secrets of an earlier agent may be left in the cluster: %s", error)

    async def _until_done(self, attempt: _Attempt, ask: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Ask the cluster again and again, until it has done it, the attempt is over, or it refuses for good."""
        backoff = Backoff(RETRY_S, RETRY_S_MAX)
        while not attempt.over.is_set():
            try:
                await ask()
                return
            except ClusterError as error:
                log.warning("job %s: the Kubernetes cluster: %s", attempt.name[1], error)
                if error.status in (400, 422):
                    return
            except ClusterDown as error:
                log.debug("%s: %s", attempt.name[1], error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await attempt.over.wait()

    # -- inside: tasks

    def _run(self, attempt: _Attempt, way: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a step of an attempt in a task.

        An exception is logged, and reported as `Stuck`: the attempt's devices stay quarantined, others run on.
        """

        async def run() -> None:
            try:
                await way
            except Exception:
                log.exception("the state of the pod of job %s is lost", attempt.name[1])
                self.report(Stuck([attempt.name]))

        task = asyncio.get_running_loop().create_task(run())
        attempt.tasks.add(task)
        task.add_done_callback(attempt.tasks.discard)
        return task

    def _begin(self, way: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await way
            except Exception:
                log.exception("a task of the driver kubernetes failed")

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _at(self, attempt: _Attempt, after_s: float, what: Any) -> None:
        attempt.timers.append(asyncio.get_running_loop().call_later(after_s, what, attempt))


async def _node(cluster: Cluster, own: KubernetesSettings) -> dict[str, Any]:
    """Return the worker's node. Raises Refused if the settings name none, or the cluster does not return it."""
    if not own.node:
        raise refuse(
            "failed-precondition",
            "the driver kubernetes does not know its node",
            field="$.driver.kubernetes.node",
            next="set node in [driver.kubernetes]; in a pod, MOORAGE_DRIVER_KUBERNETES_NODE from spec.nodeName",
        )
    try:
        return await cluster.node(own.node)
    except (ClusterDown, ClusterError) as error:
        raise _no_cluster(error) from None


def is_older(version: str, than: str) -> bool:
    """Return whether a version of the cluster is from before another; versions that are no numbers are not compared."""
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)


def _no_cluster(error: ClusterDown | ClusterError) -> MoorageError:
    return refuse(
        "failed-precondition",
        f"the driver kubernetes cannot use its cluster: {error}",
        field="$.driver.kubernetes",
        next="check that the API server is reachable, and that the user may list pods and read the node",
    )
