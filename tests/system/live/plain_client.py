"""A client that shares no code with moorage: a TCP socket, JSON, and what docs/protocol.md says. Copy it."""

import json
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

OVER = {"SUCCEEDED", "FAILED", "TIMED_OUT", "CANCELLED", "EXPIRED", "REJECTED"}


class Plain:
    """`ask("api.vision.submit", {...})`, then `follow("vision", "train-42")`. Gives up after `timeout_s` of silence."""

    def __init__(self, host: str, port: int, prefix: str = "moorage", timeout_s: float = 10) -> None:
        self.prefix, self.inbox, self.asked = prefix, f"_INBOX.{secrets.token_hex(8)}", 0
        self.events: list[Any] = []
        self.socket = socket.create_connection((host, port), timeout_s)
        self.lines = self.socket.makefile("rb")
        self.send('CONNECT {"verbose":false,"headers":true,"no_responders":true}', f"SUB {self.inbox}.* inbox")

    def send(self, *lines: str) -> None:
        self.socket.sendall("".join(line + "\r\n" for line in lines).encode())

    def receive(self) -> tuple[str, Any]:
        """The next message, as (subject, JSON); {} is the server's own answer: nobody listens there now."""
        while line := self.lines.readline().split():
            if line[0] == b"PING":
                self.send("PONG")
            elif line[0] == b"-ERR":
                raise ConnectionError(line)
            elif line[0] in (b"MSG", b"HMSG"):
                message = self.lines.read(int(line[-1]) + 2)
                body = message[int(line[-2]) :] if line[0] == b"HMSG" else message
                return line[1].decode(), json.loads(body.strip() or b"{}")
        raise ConnectionError("the server closed the connection")

    def ask(self, subject: str, body: dict[str, Any], tries: int = 900) -> Any:
        """Request and answer; sent again while nobody leads, which is safe as every request names its job."""
        self.asked += 1
        payload, reply = json.dumps(body), f"{self.inbox}.{self.asked}"
        for _ in range(tries):
            self.send(f"PUB {self.prefix}.{subject} {reply} {len(payload)}", payload)
            while (got := self.receive())[0] != reply:
                self.events.append(got[1])
            if got[1] and got[1].get("code") != "not-leading":
                return got[1]
            time.sleep(0.1)
        raise TimeoutError(f"nobody answers on {self.prefix}.{subject}")

    def follow(self, tenant: str, job: str) -> Iterator[Any]:
        """Every change of a job once, in order, until it is over; `show` tells what came before and closes gaps."""
        self.send(f"SUB {self.prefix}.event.{tenant}.{job} {job}")
        told, seen = self.ask(f"api.{tenant}.show", {"job": job})["data"], 0
        while True:
            for change in told["changes"]:
                if change["rev"] == seen + 1:
                    seen += 1
                    yield change
            if seen == told["rev"] and told["state"] in OVER:
                return
            told = self.events.pop(0) if self.events else self.receive()[1]
            while told["job"] != job:  # of one followed before
                told = self.events.pop(0) if self.events else self.receive()[1]
            if told["changes"][0]["rev"] > seen + 1:
                told = self.ask(f"api.{tenant}.show", {"job": job})["data"]
