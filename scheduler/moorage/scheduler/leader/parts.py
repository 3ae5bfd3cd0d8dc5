"""The parts of a scheduler process, whether it leads or stands by."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket

from moorage.bus.connection import Connection
from moorage.bus.jetstream import JetStream
from moorage.scheduler.buckets.beside import BucketsBeside
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.durable.queue_streams import QueueStreams
from moorage.scheduler.durable.tenant_buckets import TenantBuckets
from moorage.scheduler.follower.beside import FollowerBeside
from moorage.scheduler.follower.follower import Follower
from moorage.scheduler.leader.copies import Copies
from moorage.scheduler.ledger.ledger import Ledger
from moorage.scheduler.ledger.one_copy import try_copies
from moorage.scheduler.ledger.recording import Recorder
from moorage.scheduler.ledger.snapshot_follower import Command
from moorage.scheduler.ledger.snapshots import Snapshots
from moorage.scheduler.questions.standing import Standings
from moorage.scheduler.settings import RECORDS_BETWEEN
from moorage.schemas.subjects import Subjects


class Parts:
    """The connections, streams and settings of a scheduler process.

    `world` is the connection to the users' account for workers and other schedulers, `ledger_world` the one to the
    schedulers' own account. `operators` and `tenants` are connections to the users' account, too, by default the one
    for workers: the server cuts a connection that does not read as fast as is sent to it, so a flood of one sort of
    clients must not reach the connection of another sort. `leading` is
    set while this process leads, `caught_up` once it has read the ledger to its end: then it leads or stands by.
    """

    def __init__(
        self,
        world: Connection,
        ledger_world: Connection,
        *,
        operators: Connection | None = None,
        tenants: Connection | None = None,
        out: Connection | None = None,
        config: Config | None = None,
        subjects: Subjects | None = None,
        replicas: int = 1,
        name: str = "",
        snapshot_command: Command | None = None,
        follower_command: Command | None = None,
        buckets_command: Command | None = None,
        snapshot_records: int = RECORDS_BETWEEN,
        own_process: bool = False,
        recorder: Recorder | None = None,
        ceilings: Ceilings = CEILINGS,
    ) -> None:
        """Workers and other schedulers are heard on `world`, operators and tenants on connections of their own. A
        leader speaks on `out`, where nothing comes for which the server could cut it.

        `snapshot_command` starts the process that writes snapshots; with None there are none.

        `follower_command` starts the process that follows the ledger beside the leader; with None a task of this
        process does. So it is with `buckets_command` and what workers ask of buckets.

        `own_process` says that nothing else runs in this process: then the scheduler controls the garbage collector,
        and copies the process for questions about the future. Otherwise there are no forecasts.
        """
        self.took_over = ""  # why this process leads, or has led last
        self.displaced_s = -math.inf  # when a record of its was last stored elsewhere than foreseen, monotonic
        self.own_process = own_process
        self.recorder = recorder
        self.snapshot_command = snapshot_command
        self.snapshot_records = snapshot_records
        self._follower_command = follower_command
        self.config = config or Config()
        self.subjects = subjects or Subjects()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.world = world
        self.operators = operators or world
        self.tenants = tenants or world
        self.out = out or world
        self.ledger_world = ledger_world
        self.replicas = replicas
        self.leader = secrets.randbits(62)
        self.world_js = JetStream(self.operators)  # workers wait for nothing that is read from streams
        self.ceilings = ceilings
        self.ledger = Ledger(JetStream(ledger_world), self.subjects, self.leader, replicas=replicas, ceilings=ceilings)
        self._ledger_js = JetStream(ledger_world)
        self.snapshots = Snapshots(self._ledger_js, self.subjects, replicas, ceilings)
        self.copies = Copies(JetStream(ledger_world), self.subjects, replicas)
        self.queue_streams = QueueStreams(self.world_js, self.subjects, replicas, self.operators)
        self.tenant_buckets = TenantBuckets(self.world_js, self.subjects, replicas, self._try_room)
        self.buckets = BucketsBeside(world, self.subjects, buckets_command)
        self.standings = Standings(world, self.subjects, self.name, self.config)
        self.leading = asyncio.Event()
        self.caught_up = asyncio.Event()

    async def _try_room(self, size: int) -> None:
        """Raise `BusError` if the servers have no room for streams of `size` bytes together.

        The ledger's account may delete the stream with which they are asked; the users' account need not.
        """
        await try_copies(self._ledger_js, self.subjects, self.replicas, size)

    def follower(self) -> FollowerBeside:
        """Return the follower for a new term."""
        at = (
            self._ledger_js,
            self.world_js,
            self.subjects,
            self.config,
            self.replicas,
            self.snapshot_records,
            self.ceilings,
        )
        return FollowerBeside(self._follower_command, lambda: Follower(*at))
