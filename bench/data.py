"""How long the first start of a job with data takes, the second one, and how often many replicas fetch it.

python -m bench.data --nats URL [--size-mb 2048] [--replicas 200]

The data are one file that a server in this process gives. Run it beside `moorage up --simulate 4x8xH100`.
"""

from __future__ import annotations

import argparse
import http.server
import os
import secrets
import threading
import time
from typing import Any

from moorage.client import Client

_PIECE = os.urandom(1 << 20)


class _Web(http.server.ThreadingHTTPServer):
    """A server of one file of so many MiB that counts how often it was asked for."""

    def __init__(self, mebibytes: int) -> None:
        self.asked, web = 0, self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked += 1
                self.send_response(200)
                self.end_headers()
                for _ in range(mebibytes):
                    self.wfile.write(_PIECE)

            def log_message(self, *words: Any) -> None:
                """Say nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nats")
    parser.add_argument("--size-mb", type=int, default=2048)
    parser.add_argument("--replicas", type=int, default=200)
    asked = parser.parse_args()
    web = _Web(asked.size_mb)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    source = {"set": f"{web.url}/set.bin?{secrets.token_hex(4)}"}
    read = ["sh", "-c", 'stat -c %s "$MOORAGE_DATA_SET/set.bin"']
    with Client(asked.nats) as m:
        worker = m.fleet.show().workers[0].worker
        here: dict[str, Any] = {"data": source, "requires": {"host.name": [worker]}}
        times: list[float] = []
        for _ in range(3):
            began = time.perf_counter()
            result = m.submit(read, gpu="1xH100", **here).result()
            times.append(time.perf_counter() - began)
            assert result.state == "SUCCEEDED", result
        part = times[1] / times[0]
        print(
            f"first {times[0]:.2f} s, second {times[1]:.3f} s ({part:.3f} of it), third {times[2]:.3f} s; {web.asked}"
        )
        web.asked = 0
        began = time.perf_counter()
        many = {"set": f"{web.url}/set.bin?{secrets.token_hex(4)}"}
        job = m.submit(read, gpu="1xH100", data=many, replicas=asked.replicas)
        assert job.result(wait="1h").state == "SUCCEEDED"
        took = time.perf_counter() - began
        print(f"{asked.replicas} replicas: fetched {web.asked} times, {took:.1f} s")


if __name__ == "__main__":
    main()
