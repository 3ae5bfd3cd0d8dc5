"""Tells the users' account from the ledger's: no user reaches what a scheduler makes for users in the ledger's."""

from __future__ import annotations

from moorage.bus.connection import Connection
from moorage.bus.embedded import ACCOUNT_LEDGER
from moorage.scheduler.durable.queue_streams import user_info
from moorage.schemas.errors import refuse
from moorage.schemas.subjects import Subjects


async def check_users_account(world: Connection, subjects: Subjects) -> None:
    """Raise `Refused` if this user is one of the ledger's account, as `nats-config` and `moorage up` name it.

    Raises `BusError`.
    """
    account = (await user_info(world)).account
    if account in (subjects.ledger_stream, ACCOUNT_LEDGER):
        raise refuse(
            "failed-precondition",
            f"this key is of the ledger's account, {account}: no user would reach what a scheduler has there",
            field="nats",
            found=account,
            allowed="a scheduler's key of the users' account",
            next="--nats scheduler.NAME, and the ledger's key beside it: MOORAGE_LEDGER_URL=ledger.NAME",
        )
