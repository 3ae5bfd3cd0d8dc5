#!/usr/bin/env bash
# Behaviour: LitServe and mosec answer all requests of a batch as the one that their decode step refused, with its status and text.
# Versions: litserve 0.2.19, mosec 0.9.8
# Guess: decode_request and deserialize are each request's own: one that is refused there is answered 400 or 422 alone, and the others run. Only an error of the model is that of its batch.
# Seen: Of four requests in one batch, one refused leaves four refused: 400 "no such model" by LitServe, 422 by mosec; the model is not called at all. Sent without it, the other three are answered.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages litserve==0.2.19 mosec==0.9.8
bounded 180 <<'EOF'
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from findings.verdict import verdict

WAIT_S = 60
FOLDER = Path(tempfile.mkdtemp())
LITSERVE = """
import sys
import litserve
from fastapi import HTTPException


class Api(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        if request["input"] == "refused":
            raise HTTPException(400, "no such model")
        return request["input"]

    def predict(self, inputs):
        print("model", flush=True, file=open("called", "a"))
        return inputs

    def encode_response(self, output):
        return {"output": output}


if __name__ == "__main__":
    server = litserve.LitServer(Api(max_batch_size=4, batch_timeout=5), accelerator="cpu", devices=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, generate_client_file=False)
"""
MOSEC = """
import json
import mosec


class Model(mosec.Worker):
    def deserialize(self, data):
        found = json.loads(data)["input"]
        if found == "refused":
            raise mosec.ValidationError("no such model")
        return found

    def forward(self, inputs):
        print("model", flush=True, file=open("called", "a"))
        return inputs


if __name__ == "__main__":
    server = mosec.Server()
    server.append_worker(Model, max_batch_size=4, max_wait_time=5000)
    server.run()
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def looked(name, text, options, health, path):
    """Serve a model of `text`; return how four requests are answered and whether the model was called, twice."""
    folder = FOLDER / name
    folder.mkdir()
    (folder / "serve.py").write_text(text)
    port = free_port()
    command = [sys.executable, "serve.py", *(option.format(port=port) for option in options)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        ends = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError):
                if ask(port, "GET", health)[0] == 200:
                    break
            assert time.monotonic() < ends, (folder / "log").read_text()[-1000:]
            time.sleep(0.1)
        found = []
        for inputs in (("a", "refused", "c", "d"), ("a", "c", "d")):
            (folder / "called").write_text("")
            bodies = ['{"input": "%s"}' % each for each in inputs]
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda body: ask(port, "POST", path, body), bodies))
            found.append(([status for status, _ in answers], "model" in (folder / "called").read_text()))
        return found
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


seen = {
    "litserve": looked("litserve", LITSERVE, ["{port}"], "/health", "/predict"),
    "mosec": looked("mosec", MOSEC, ["--address", "127.0.0.1", "--port", "{port}", "--timeout", "60000"], "/", "/inference"),
}
verdict(
    seen
    == {
        "litserve": [([400] * 4, False), ([200] * 3, True)],
        "mosec": [([422] * 4, False), ([200] * 3, True)],
    },
    {f"{name}, with one refused and without": found for name, found in seen.items()},
)
EOF
