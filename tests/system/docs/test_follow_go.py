"""docs/examples/follow.go as a reader runs it, on the fleet of the how-to pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.cli.node import Node
from tests.system.docs.driver import environment, run, skip_without
from tests.unit.docs.markdown import DOCS, page

STEPS = """
```sh
go run follow.go
```

```text
1 ACCEPTED
2 PLACED sim-…
3 CLAIMED sim-…
4 RUNNING sim-…
5 SUCCEEDED sim-…
```
"""


@pytest.mark.slow
def test_go_sample_prints_each_change_once(tmp_path: Path, open_fleet: Node) -> None:
    sample = DOCS / "examples" / "follow.go"
    block = f'<!-- needs: go nats.go -->\n```go title="follow.go"\n{sample.read_text()}```\n'
    wanted = page(sample, block + STEPS)
    skip_without(wanted)
    run(wanted, tmp_path, environment(tmp_path, MOORAGE_HOME=str(open_fleet.folder), NATS_URL=open_fleet.url))
