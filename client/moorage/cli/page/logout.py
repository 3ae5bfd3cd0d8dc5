"""`moorage page logout`: no browser and no link of before holds any more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_out
from moorage.cli.framework.files import cannot_write
from moorage.cli.framework.options import LOCAL, LocalOptions, guarded
from moorage.client.errors import rejected


def logout(
    *,
    secret_file: Annotated[Path, Parameter(help="The file that the page was started with.")],
    all: Annotated[bool, Parameter(help="Yes, every browser: the page knows each by this one secret.")] = False,
    options: LocalOptions = LOCAL,
) -> int:
    """Log every browser out of a page, which goes on with a new secret: links of before are refused, too.

    The page that runs takes the new secret at once, and prints its new link. A page without --secret-file has its
    secret in its process alone: start it again. Names that a trusted proxy gives are the proxy's to end.
    """

    def act() -> int:
        from moorage.cli.page.secret import renew

        if not all:
            raise rejected(
                "invalid-argument", "a single browser cannot be logged out: all share the secret of the page",
                next=f"moorage page logout --all --secret-file {secret_file}",
            )  # fmt: skip
        if not secret_file.is_file():
            raise rejected(
                "failed-precondition", f"{secret_file} is no file with the secret of a page", found=str(secret_file),
                next="name the --secret-file of the page; a page without one ends all logins when it is started again",
            )  # fmt: skip
        try:
            renew(secret_file)
        except OSError as error:
            raise cannot_write(secret_file, error.strerror, "run it as the user of the page") from None
        if options.json:
            emit({"kind": "logout", "secret_file": str(secret_file)})
        else:
            print_out("all browsers are logged out; a page that runs prints its new link")
        return 0

    return guarded(options, act)
