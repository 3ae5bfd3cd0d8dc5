"""Make from the code what repeats it: the protocol page, the states, `reference_pages`, the
configurations of `deploy/nats`, the board of `deploy/grafana`, `llms.txt`, the README's figures, and
the client without `await`.

`python -m tools.generate` writes them, `--check` fails when what stands there is not what the code says, `--schemas`
writes the JSON schemas for the site.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from moorage.bus.site import shipped
from moorage.cli.framework.settings import example_file
from moorage.schemas.described import json_schema
from moorage.schemas.job import Request
from tools import reference_pages
from tools.board import board
from tools.examples_of_frames import EXAMPLES
from tools.llms import llms
from tools.protocol_page import protocol
from tools.python_page import extending, python_api
from tools.readme_figures import README, readme
from tools.sync_twin import TARGET, sync_twin

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
HEAD: Final = "<!-- made by tools/generate.py from the code: edit the code, then `make docs` -->\n\n"


def schemas() -> dict[Path, str]:
    """Return the JSON schema of each frame, for the site: `docs/schemas` is not committed."""
    kinds = {"request": Request} | {name.lower(): type(example) for name, _, example in EXAMPLES}
    return {
        DOCS / "schemas" / f"{name}.json": json.dumps(json_schema(kind), indent=1, sort_keys=True) + "\n"
        for name, kind in kinds.items()
    }


def pages() -> dict[Path, str]:
    """Every generated file and what should stand in it."""
    made = {
        DOCS / "protocol.md": HEAD + protocol(),
        DOCS / "reference" / "states.md": HEAD + reference_pages.states(),
        DOCS / "reference" / "errors.md": HEAD + reference_pages.errors(),
        DOCS / "reference" / "cli.md": HEAD + reference_pages.command(),
        DOCS / "reference" / "permissions.md": HEAD + reference_pages.permissions(),
        DOCS / "reference" / "python.md": HEAD + python_api(),
        DOCS / "reference" / "extending.md": HEAD + extending(),
        DOCS / "reference" / "settings.md": HEAD + reference_pages.settings(),
        DOCS / "examples" / "moorage.toml": example_file(),
        DOCS.parent / "deploy" / "grafana" / "moorage.json": board(),
        DOCS / "llms.txt": llms(),
        TARGET: sync_twin(),
        README: readme(),
    }
    for folder, files in shipped().items():
        made |= {DOCS.parent / "deploy" / "nats" / folder / name: text for name, text in files.items()}
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is stale")
    parser.add_argument("--schemas", action="store_true", help="write the JSON schemas alone, into docs/schemas")
    asked = parser.parse_args()
    check = asked.check
    made = schemas() if asked.schemas else pages()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"stale: {path.relative_to(DOCS.parent)} (run `make docs`)")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path])
            print(f"wrote {path.relative_to(DOCS.parent)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
