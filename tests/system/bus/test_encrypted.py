"""Where TLS is asked for nothing is said without it, and a handshake that fails is told at once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.contexts import Context
from moorage.bus.embedded import find_binary
from moorage.bus.errors import BadContext, CannotConnect, NotNats
from tests.leftover import ends_with_the_test
from tests.waiting import until

#: a certificate for 127.0.0.1, signed by itself: nobody trusts it who does not say so
OPENSSL: Final = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {0}/key.pem -out {0}/cert.pem "
    "-days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
)


def speaking_first(
    greeting: bytes, heard: bytearray | None = None
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A listener that is no NATS server: it says this, and keeps what it hears."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        try:
            while piece := await reader.read(4096):
                (bytearray() if heard is None else heard).extend(piece)
        except ConnectionError:
            pass
        finally:
            writer.close()

    return serve


@contextlib.asynccontextmanager
async def tls_server(folder: Path, first: str = ", handshake_first: auto") -> AsyncIterator[str]:
    """A server of its own that asks for TLS, with the certificate `cert.pem` in this folder."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: it makes a certificate")
    making = await asyncio.create_subprocess_exec(*OPENSSL.format(folder).split(), stderr=asyncio.subprocess.DEVNULL)
    assert await making.wait() == 0
    conf = f'tls {{ cert_file: "{folder}/cert.pem", key_file: "{folder}/key.pem"{first} }}'
    async with server_with(folder, conf) as ports:
        yield f"tls://{urlsplit(ports['nats'][0]).netloc}"


@contextlib.asynccontextmanager
async def server_with(folder: Path, conf: str) -> AsyncIterator[dict[str, list[str]]]:
    """A server of its own with more configuration; where it listens, by kind."""
    (folder / "nats.conf").write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"\n{conf}\n')
    command = (find_binary(), "-c", str(folder / "nats.conf"))
    process = ends_with_the_test(await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL))
    ports = folder / f"nats-server_{process.pid}.ports"
    await until(lambda: ports.exists() and ports.read_text().endswith("}"), what="it listens")
    try:
        yield msgspec.json.decode(ports.read_bytes())
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def late_at_first(url: str, refused: int = 0) -> AsyncIterator[str]:
    """A way to the server on which the first client's bytes arrive once the server has spoken, as of a slow machine.

    Before that it hangs up on so many clients, as while the server is not up yet."""
    port, connections = urlsplit(url).port, 0

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spoken: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                writer.write(piece)
                spoken.set()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections <= refused:
            writer.close()
            return
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        spoken = asyncio.Event()
        answering = asyncio.create_task(pass_on(from_server, writer, spoken))
        if connections == refused + 1:
            await spoken.wait()
        await pass_on(reader, to_server, asyncio.Event())
        await answering

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.filterwarnings("ignore:parameter 'timeout':DeprecationWarning")  # nats-py's, to aiohttp
async def test_a_web_socket_carries_messages(tmp_path: Path) -> None:
    conf = 'websocket { listen: "127.0.0.1:-1", no_tls: true }'
    async with server_with(tmp_path, conf) as ports, await connect(ports["websocket"][0], "asker") as connection:
        heard = asyncio.Event()
        await connection.subscribe("a", lambda _: heard.set())
        await connection.send([("a", b"", "")])
        await asyncio.wait_for(heard.wait(), 60)


async def test_a_server_without_tls_is_refused(nats_url: str) -> None:
    with pytest.raises(BadContext, match="offers none") as refused:
        await connect(f"tls://{urlsplit(nats_url).netloc}", "in secret")
    assert refused.value.key == "url"


async def test_who_stands_between_hears_no_secret() -> None:
    """A server's first line may be forged, so nothing depends on it: what is sent is the beginning of TLS."""
    heard = bytearray()
    line = b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n'
    async with await asyncio.start_server(speaking_first(line, heard), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        context = Context(url=f"tls://127.0.0.1:{port}", user="somebody", password="hunter2")
        # nats-py has or has not read that line when it begins to encrypt
        with pytest.raises((CannotConnect, BadContext)):
            await connect(context, "in secret", give_up_after_s=0.1)
    assert [word for word in (b"somebody", b"hunter2", b"CONNECT", b"PING") if word in heard] == []


async def test_a_server_that_encrypts_late_is_refused_with_the_fix(tmp_path: Path) -> None:
    """Without `handshake_first` a server writes its first line in the open, and waits for the client to encrypt."""
    async with tls_server(tmp_path, first="") as url:
        # where that line comes before nats-py begins to encrypt, it is lost, and both sides wait
        with pytest.raises((BadContext, NotNats), match=r"offers none at the start|did not greet") as refused:
            await connect(Context(url=url, ca=str(tmp_path / "cert.pem")), "in secret", give_up_after_s=3)
    assert "handshake_first: auto" in refused.value.problem.next


async def test_a_certificate_that_nobody_trusts_is_told_at_once(tmp_path: Path) -> None:
    """nats-py waits for ever for the end of a socket whose handshake failed: nothing of ours waits with it."""
    async with tls_server(tmp_path) as url, asyncio.timeout(60):
        before = asyncio.all_tasks()
        with pytest.raises(BadContext, match="self-signed") as refused:
            await connect(url, "in secret")
        assert asyncio.all_tasks() == before
    assert refused.value.key == "ca"
    assert "ca" in refused.value.problem.next


async def test_one_that_is_trusted_encrypts(tmp_path: Path) -> None:
    async with (
        tls_server(tmp_path) as url,
        await connect(Context(url=url, ca=str(tmp_path / "cert.pem")), "in secret") as connection,
    ):
        await connection.flush()  # the server takes no client without TLS


@pytest.mark.parametrize("refused", [0, 12])
async def test_a_client_whose_first_bytes_are_late_begins_again(tmp_path: Path, refused: int) -> None:
    """With `handshake_first: auto` the server speaks in the open to a client that is silent for 50 ms: on a busy
    machine a connection was refused for good. Attempts from before the server was up do not count."""
    async with tls_server(tmp_path) as server, late_at_first(server, refused) as url:
        context = Context(url=url, ca=str(tmp_path / "cert.pem"))
        async with await connect(context, "in secret", give_up_after_s=30) as connection:
            await connection.flush()


async def test_the_end_of_an_encrypted_connection_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """nats-py's reader does not know that it reads through TLS, and asyncio warned of it, on the command's screen."""
    async with tls_server(tmp_path) as url:
        connection = await connect(Context(url=url, ca=str(tmp_path / "cert.pem")), "in secret")
    await until(lambda: not connection.is_connected)
    await connection.close()
    assert not [each for each in caplog.records if each.name == "asyncio"]
