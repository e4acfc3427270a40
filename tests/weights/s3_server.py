"""An S3 server (moto, in a process of its own) and a gateway before it that misbehaves on demand."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from etude.weights.store import Store, StoreConfig

START_SECONDS = 30.0
BUCKET = "bucket"


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@contextlib.contextmanager
def moto() -> Iterator[int]:
    """The port of a server with an empty bucket. It keeps everything in memory."""
    process, port = _started()
    try:
        region = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        assert exchange(port, "PUT", f"/{BUCKET}", b"", {"Authorization": region})[0] == 200
        yield port
    finally:
        process.terminate()
        process.wait(10)


def _started() -> tuple[subprocess.Popen[bytes], int]:
    """A server that answers, and its port; another port where somebody else was faster to take the first."""
    deadline = time.monotonic() + START_SECONDS
    for _ in range(3):
        port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            if _answers(port):
                return process, port
            assert time.monotonic() < deadline, f"moto did not answer within {START_SECONDS:.0f} s"
            time.sleep(0.02)
    raise AssertionError("moto ended; is moto[s3] with flask and flask-cors installed?")


def store(port: int, prefix: str, request_seconds: float = 10.0, retries: int = 4) -> Store:
    """A client that is quick to try again and to give up."""
    options = {
        "endpoint": f"http://127.0.0.1:{port}", "access_key_id": "a", "secret_access_key": "b", "region": "us-east-1",
    }  # fmt: skip
    config = StoreConfig(
        options=options, request_seconds=request_seconds, retries=retries, retry_seconds=5.0, first_backoff_seconds=0.01
    )
    return Store(f"s3://{BUCKET}/{prefix}", config)


def exchange(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def _answers(port: int) -> bool:
    try:
        return exchange(port, "GET", "/moto-api/", b"", {})[0] == 200
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------ the gateway


@dataclass
class Fault:
    """What happens to the next ``times`` requests of ``method`` whose path contains ``part``."""

    kind: str
    """unavailable: 503. cut_request: the line drops while the body comes in. lose_reply: done, but the line drops before the
    answer. cut_reply: half of the body, then the line drops. flip: one byte is wrong. stall: nothing for ``seconds``."""
    method: str
    part: str
    times: int = 1 << 30
    seconds: float = 0.0


@dataclass
class Gateway:
    port: int
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str, frozenset[str]]] = field(default_factory=list)
    """(method, path, names of the headers) of every request."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: Callable[[str], None] = lambda path: None
    """Told the path of a request that stalls."""

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and method == fault.method and fault.part in path:
                    fault.times -= 1
                    return fault
        return None


@contextlib.contextmanager
def gateway(behind: int) -> Iterator[Gateway]:
    """Before the server on port ``behind``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle_one_request(self) -> None:
            with contextlib.suppress(OSError):
                super().handle_one_request()

        def _serve(self) -> None:
            made.seen.append((self.command, self.path, frozenset(name.lower() for name in self.headers)))
            fault = made.fault(self.command, self.path)
            kind = fault.kind if fault else ""
            size = int(self.headers.get("Content-Length", 0))
            if kind == "cut_request":
                self.rfile.read(size // 2)
                self._drop()
                return
            body = self.rfile.read(size)
            if kind == "stall" and fault is not None:
                made.waiting(self.path)
                closing.wait(fault.seconds)
                self._drop()
                return
            if kind == "unavailable":
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status, headers, reply = exchange(behind, self.command, self.path, body, dict(self.headers))
            if kind == "lose_reply":
                self._drop()
                return
            if kind == "flip" and reply:
                middle = len(reply) // 2
                reply = reply[:middle] + bytes([reply[middle] ^ 1]) + reply[middle + 1 :]
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(reply))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(reply[: len(reply) // 2] if kind == "cut_reply" else reply)
            if kind == "cut_reply":
                self._drop()

        def _drop(self) -> None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    closing = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made = Gateway(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
