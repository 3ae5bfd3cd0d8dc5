"""A registry of images on this machine: one image, which can be larger than a disk, or not come at all."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from typing import Final

from tests.engines import image_of

MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
_KIND: Final = "application/vnd.docker."


def large_layer(size_bytes: int) -> bytes:
    """Return a layer of one file of zeros: larger than an engine's disk, and small on its way there."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        info = tarfile.TarInfo("large")
        info.size = size_bytes
        tar.addfile(info, io.BytesIO(bytes(size_bytes)))
    return made.getvalue()


class Registry(http.server.ThreadingHTTPServer):
    """The image `box:1`, by its tag and its digest, for all users or for one, `login`."""

    daemon_threads = True

    def __init__(self, layer: bytes, login: str) -> None:
        super().__init__(("127.0.0.1", 0), Registry.Handler)
        self.login = "Basic " + base64.b64encode(login.encode()).decode() if login else None
        self.comes = threading.Event()
        """Whether a layer comes to its end; `asked` once one was asked for."""
        self.comes.set()
        self.asked = threading.Event()
        diff = f"sha256:{hashlib.sha256(layer).hexdigest()}"
        rootfs = {"type": "layers", "diff_ids": [diff]}
        config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}).encode()
        parts = {"container.image.v1+json": config, "image.rootfs.diff.tar.gzip": gzip.compress(layer, 1)}
        self.blobs = {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in parts.values()}
        told = [
            {"mediaType": _KIND + kind, "size": len(data), "digest": digest}
            for (kind, data), digest in zip(parts.items(), self.blobs, strict=True)
        ]
        self.layer: str = told[1]["digest"]  # type: ignore[assignment]
        shown = {"schemaVersion": 2, "mediaType": MANIFEST, "config": told[0], "layers": told[1:]}
        self.manifest = json.dumps(shown).encode()
        self.digest = f"sha256:{hashlib.sha256(self.manifest).hexdigest()}"
        self.address = f"127.0.0.1:{self.server_address[1]}"

    @classmethod
    @contextlib.contextmanager
    def serving(cls, layer: bytes | None = None, login: str = "") -> Iterator[Registry]:
        """Serve an image of this layer, else of a shell, until the block ends."""
        with cls(image_of(("sh",)) if layer is None else layer, login) as made:
            serves = threading.Thread(target=made.serve_forever)
            serves.start()
            try:
                yield made
            finally:
                made.comes.set()
                made.shutdown()
                serves.join()

    class Handler(http.server.BaseHTTPRequestHandler):
        server: Registry

        def do_GET(self) -> None:
            server, last = self.server, self.path.rpartition("/")[2]
            if server.login is not None and self.headers["Authorization"] != server.login:
                self._answer(401, b"{}", {"WWW-Authenticate": 'Basic realm="test"'})
            elif "/manifests/" in self.path and last in ("1", server.digest):
                headers = {"Content-Type": MANIFEST, "Docker-Content-Digest": server.digest}
                self._answer(200, server.manifest, headers)
            elif (found := server.blobs.get(last)) is not None or self.path == "/v2/":
                self._answer(200, found or b"{}", {}, last)
            else:
                kind = {"Content-Type": "application/json"}
                self._answer(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}', kind)

        do_HEAD = do_GET

        def _answer(self, status: int, data: bytes, headers: dict[str, str], blob: str = "") -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "GET":
                return
            with contextlib.suppress(OSError):  # who asked has gone
                half = len(data) // 2
                self.wfile.write(data[:half])
                self.wfile.flush()
                if blob == self.server.layer:
                    self.server.asked.set()
                    self.server.comes.wait(300)
                self.wfile.write(data[half:])

        def log_message(self, *_: object) -> None:
            """Nothing: not to standard error."""
