"""llama.cpp's own HTTP server, as `xllamacpp` brings it: `python llama_server.py -m FILE -np 4 --port 8000`.

It takes the words of `llama-server` that the page of LLMs has.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp

parser = argparse.ArgumentParser()
parser.add_argument("-m", dest="model", required=True)
parser.add_argument("-np", dest="places", type=int, default=1)
parser.add_argument("--port", type=int, required=True)
said = parser.parse_args()
asked = xllamacpp.CommonParams()
asked.model.path = asked.model_alias = said.model
asked.hostnames = ["127.0.0.1"]
asked.port = said.port
asked.n_parallel = said.places
asked.n_ctx = 512 * said.places
asked.cpuparams.n_threads = 1
asked.warmup = asked.fit_params = False
asked.use_jinja = asked.endpoint_metrics = True
server = xllamacpp.Server(asked)
print(server.listening_address, flush=True)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
