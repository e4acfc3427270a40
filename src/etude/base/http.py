"""A lean HTTP/1.1 client for one server: keep-alive connections over asyncio, parsed by ``httptools``.

A rollout makes a call a turn, and general-purpose clients cost milliseconds of Python a call when many are in flight (their
pools scan all connections); this one costs a fraction of that. It knows whole bodies only.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast
from urllib.parse import urlsplit

import httptools


class Answer:
    """Status and body of one answer."""

    __slots__ = ("body", "status")

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body


class Transport:
    """Sends requests to ``base_url``. Belongs to the event loop it is first used on."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or url.hostname is None:
            raise ValueError(f"base_url {base_url!r}: expected http://host:port")
        self._secure = url.scheme == "https"
        self._address = (url.hostname, url.port or (443 if self._secure else 80))
        self._prefix = url.path.rstrip("/")
        lines = {"host": url.netloc.rpartition("@")[2], **headers}
        if any("\n" in value or "\r" in value for value in lines.values()):
            raise ValueError("a header value holds a line break")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes = b"") -> Answer:
        """One request. Raises OSError when the server cannot be reached or breaks off, TimeoutError from the caller's scope."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                try:
                    return await self._exchange(connection, data)
                except _ClosedIdle:
                    continue  # the server had just closed it; nothing of the request was answered
        _, opened = await asyncio.get_running_loop().create_connection(
            _Connection, *self._address, ssl=self._secure or None
        )
        try:
            return await self._exchange(opened, data)
        except _ClosedIdle as error:
            raise ConnectionResetError(str(error)) from None

    async def _exchange(self, connection: _Connection, data: bytes) -> Answer:
        try:
            answer = await connection.send(data)
        except BaseException:
            connection.close()  # its answer, if any, belongs to nobody; the server cancels the work
            raise
        if connection.usable:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close the idle connections. Idempotent."""
        while self._idle:
            self._idle.pop().close()


class _ClosedIdle(ConnectionError):
    """The peer closed before a byte of an answer came."""


class _Connection(asyncio.Protocol):
    """One connection with at most one request on it."""

    def __init__(self) -> None:
        self.usable = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._parser: Any = None
        self._parts: list[bytes] = []
        self._started = False

    async def send(self, data: bytes) -> Answer:
        assert self._transport is not None
        self._parser, self._parts, self._started = httptools.HttpResponseParser(self), [], False
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._waiter

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # -------------------------------------------------------------------------------------- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport, so there is no isinstance to ask
        self._transport, self.usable = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self._started = True
        if self._parser is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._started:
            self._fail(ConnectionResetError("the server broke off in the middle of an answer"))
        else:
            self._fail(_ClosedIdle("the server closed the connection without an answer"))

    # ------------------------------------------------------------------------------------ called by the parser

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        parser, self._parser = self._parser, None
        self.usable = self.usable and bool(parser.should_keep_alive())
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Answer(parser.get_status_code(), b"".join(self._parts)))

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
