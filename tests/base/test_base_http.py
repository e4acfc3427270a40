"""Promises of the lean HTTP client: keep-alive, whole bodies, and a broken server is an OSError, never a hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from etude.base.http import Transport

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length"))
    return head, await reader.readexactly(length)


def with_server(handler: Handler, body: Callable[[Transport], Awaitable[None]]) -> None:
    async def main() -> None:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport = Transport(f"http://127.0.0.1:{port}", {"authorization": "Bearer k"})
        try:
            async with asyncio.timeout(10):
                await body(transport)
        finally:
            transport.close()
            server.close()

    asyncio.run(main())


def test_one_connection_serves_many_requests_and_bodies_come_whole() -> None:
    connections = 0

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            try:
                head, body = await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            assert "authorization: Bearer k" in head
            half = len(body) // 2
            writer.write(f"HTTP/1.1 201 X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body[:half])
            await writer.drain()
            await asyncio.sleep(0.001)
            writer.write(body[half:])

    async def body(transport: Transport) -> None:
        for size in (0, 1, 10, 300_000):
            answer = await transport.request("POST", "/x", b"a" * size)
            assert (answer.status, answer.body) == (201, b"a" * size)
        await asyncio.gather(*(transport.request("POST", "/x", b"b") for _ in range(5)))

    with_server(echo, body)
    assert connections == 5


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async def body(transport: Transport) -> None:
        for _ in range(3):
            assert (await transport.request("GET", "/")).body == b"ok"
            await asyncio.sleep(0.02)

    with_server(once, body)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"nonsense\r\n\r\n"])
def test_a_server_that_breaks_off_is_an_error(answer: bytes) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        writer.close()

    async def body(transport: Transport) -> None:
        with pytest.raises(OSError):  # noqa: PT011 any of its kinds will do
            await transport.request("GET", "/")

    with_server(broken, body)


def test_a_bad_address_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="expected http://host:port"):
        Transport("localhost:80", {})
