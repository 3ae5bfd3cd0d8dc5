"""Requests that decode, that no worker could run or that would be without effect: (fields, the field at fault)."""

from __future__ import annotations

from typing import Any, Final

_RUN: Final[dict[str, Any]] = {"driver": "noop"}

IMPOSSIBLE: Final[list[tuple[dict[str, Any], str]]] = [
    ({"run": {"driver": "process", "argv": [""]}}, "run.argv"),
    ({"run": {"driver": "process", "argv": ["", "x"]}}, "run.argv"),
    ({"run": {**_RUN, "cwd": "../etc"}}, "run.cwd"),
    ({"run": {**_RUN, "cwd": ""}}, "run.cwd"),
    ({"run": {**_RUN, "cwd": "/" + 4095 * "x"}}, "run.cwd"),
    ({"run": {**_RUN, "user": ""}}, "run.user"),
    ({"run": {**_RUN, "user": "-1"}}, "run.user"),
    ({"run": {**_RUN, "user": str(2**32 - 1)}}, "run.user"),
    ({"run": {**_RUN, "user": str(2**32)}}, "run.user"),
    ({"run": {**_RUN, "user": "root:root"}}, "run.user"),
    ({"run": {**_RUN, "user": "a b"}}, "run.user"),
    ({"run": {**_RUN, "env": {"T": {"secret": "../../etc/passwd"}}}}, "run.env.T.secret"),
    ({"run": {**_RUN, "env": {"T": {"secret": ".."}}}}, "run.env.T.secret"),
    ({"run": {**_RUN, "env": {"T": {"secret": ""}}}}, "run.env.T.secret"),
    ({"run": {**_RUN, "argv": ["{lr}"], "items": ["0.1"]}}, "run.argv"),
    ({"run": {**_RUN, "items": [{"a b": 1}]}}, "run.items[0]"),
    ({"run": {**_RUN, "items": {"file": "items.txt"}}}, "run.items.file"),
    ({"run": _RUN, "gpu": {"mode": "banana"}}, "gpu.mode"),
    ({"run": _RUN, "gpu": {"mps_pipe_dir": "/x"}}, "gpu.mps_pipe_dir"),
    ({"run": _RUN, "gpu": {"mps_log_dir": "/x", "sharing": "time-slice"}}, "gpu.mps_log_dir"),
    ({"run": _RUN, "gpu": {"mps_log_dir": "x", "sharing": "mps"}}, "gpu.mps_log_dir"),
    ({"run": _RUN, "gpu": {"time_slicing_config_path": "/y"}}, "gpu.time_slicing_config_path"),
    ({"run": _RUN, "gpu": {"time_slicing_config_path": "/y", "sharing": "mps"}}, "gpu.time_slicing_config_path"),
    ({"run": _RUN, "gpu": {"time_slicing_config_path": "y", "sharing": "time-slice"}}, "gpu.time_slicing_config_path"),
]

#: the same fields with what may stand there
POSSIBLE: Final[list[dict[str, Any]]] = [
    {"run": {**_RUN, "cwd": "/", "user": "0"}},
    {"run": {**_RUN, "cwd": "/srv/a b", "user": str(2**32 - 2)}},
    {"run": {**_RUN, "user": "_apt"}},
    {"run": {**_RUN, "user": "CORP\\ana@example.org"}},
    {"run": {**_RUN, "env": {"T": {"secret": "hf.token_1-a"}, "E": ""}}},
    {"run": {**_RUN, "argv": ["{lr}", "{{"], "items": [{"lr": 0.1}]}},
    {"run": {**_RUN, "files": "0" * 64, "items": {"file": "a/items.csv", "format": "csv"}}},
    {"run": _RUN, "gpu": {"mode": "native"}},
    {"run": _RUN, "gpu": {"mode": "vm", "sharing": "mps", "mps_pipe_dir": "/a", "mps_log_dir": "/b"}},
    {"run": _RUN, "gpu": {"sharing": "time-slice", "time_slicing_config_path": "/c"}},
]
