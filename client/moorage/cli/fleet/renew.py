"""`moorage admin renew`: the certificates of a site that end soon, made anew before they do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from moorage.cli.fleet.site_tls import TLS, day
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.files import cannot_write
from moorage.cli.framework.options import Options, guarded
from moorage.client.errors import rejected
from moorage.schemas.units import many


def renew(
    site: Annotated[Path, Parameter(help="The folder that nats-config wrote, with every key in it.")],
    /,
    *,
    all: Annotated[bool, Parameter(help="Every certificate, also those that last: after a key was stolen.")] = False,
    json: Annotated[bool, Parameter(help="Print what was renewed, as one JSON object.")] = False,
) -> int:
    """Make certificates of a site anew that end within 60 days, each with a new key and the names that it had.

    The site's authority keeps its key. So servers and users may change to the new files one by one, and nothing stops.
    Once its own certificate would end before those that it signs, it is made anew, too: then copy tls/ca.pem to
    everybody before the old one ends.
    """

    def act() -> int:
        from moorage.bus import certificates
        from moorage.cli.fleet.nats_config import give_call_keys

        folder = site / TLS
        if not folder.is_dir():
            raise rejected(
                "failed-precondition",
                f"{site} has no certificates: there is no folder {folder}",
                found=str(site),
                next="name the folder that `moorage admin nats-config --out` wrote for a site with TLS",
            )
        try:
            new = certificates.renew(folder, every=all)
            give_call_keys(site, [each.name for each in new])
        except OSError as error:
            raise cannot_write(error.filename or folder, error.strerror, "run this as the folder's user") from None
        if json:
            emit({"kind": "renewed", "certificates": msgspec.to_builtins([each._asdict() for each in new])})
            return 0
        for each in new:
            print_out(f"{folder / each.name}.pem\tends on {day(each.at_s)}")
        first = certificates.ends(folder)[0]
        print_err(
            f"{many(len(new), 'certificate')} renewed; the first to end now, {first.name}, ends on {day(first.at_s)}"
        )
        names = {each.name for each in new}
        if any(name.startswith("server.") for name in names):
            print_err(
                "next: put each server.N.pem and server.N.key on its server, and reload it: nats-server --signal reload"
            )
        if users := sorted(name for name in names if not name.startswith("server.") and name != certificates.AUTHORITY):
            print_err(
                f"next: put the .pem and .key of {many(len(users), 'user')} where they are used, and restart those "
                "programs"
            )
        if certificates.AUTHORITY in names:
            print_err(
                f"next: copy {folder / 'ca.pem'} to every server and every user; until the old one ends, both are "
                "trusted"
            )
        return 0

    return guarded(Options(json=json), act)
