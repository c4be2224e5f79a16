"""An S3 store on loopback (moto), and a proxy before it that fails in all the ways networks and stores do.

    def test_it(faulty: FaultyStore) -> None:
        faulty.fail("PUT", "manifest", status(500), times=2)
        ... Checkpointer(faulty.url("run")) ...

A fault meets the next `times` requests that match. What a fault does to a request is a function of the
exchange: it may answer by itself, or pass the request on first and spoil the answer.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final

import pytest

from holdfast.storage import StoreOptions

TIMEOUT_S = 60.0
KEY_ID, SECRET = "holdfast-test", "not-a-secret"
_HOP = {"connection", "transfer-encoding", "date", "server", "content-length"}


@dataclass
class Exchange:
    """One request, and what the store behind answers when asked."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    behind: tuple[str, int]
    handler: BaseHTTPRequestHandler

    def passed_on(self) -> tuple[int, dict[str, str], bytes]:
        """The store's own answer."""
        connection = http.client.HTTPConnection(*self.behind, timeout=TIMEOUT_S)
        try:
            connection.request(self.method, self.target, body=self.body, headers=self.headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
        if self.method == "HEAD":
            kept["Content-Length"] = answer.getheader("Content-Length") or "0"
        return answer.status, kept, data

    def answer(
        self,
        code: int,
        headers: dict[str, str],
        data: bytes,
        *,
        length: int | None = None,
        upto: int | None = None,
    ) -> None:
        """Send an answer; `length` may lie about it, and only `upto` bytes of it may be sent."""
        handler = self.handler
        handler.send_response_only(code)
        if "Content-Length" not in headers:
            handler.send_header("Content-Length", str(len(data) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if self.method != "HEAD":
            handler.wfile.write(data[:upto])
        handler.wfile.flush()

    def reset(self) -> None:
        """End the connection as a crashed peer does."""
        linger = struct.pack("ii", 1, 0)
        self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.handler.close_connection = True
        with suppress(OSError):
            self.handler.connection.close()


Fault = Callable[[Exchange], None]


def status(code: int, name: str = "InternalError", *, after: bool = False) -> Fault:
    """Answer with an error; `after` the store has done what it was asked."""

    def act(exchange: Exchange) -> None:
        if after:
            exchange.passed_on()
        text = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>told to</Message></Error>"
        exchange.answer(code, {"Content-Type": "application/xml"}, text.encode())

    return act


def reset(*, after: bool = False, body: bool = False) -> Fault:
    """Reset the connection: before any answer, `after` the store did it, or amid the `body` of the answer."""

    def act(exchange: Exchange) -> None:
        if body:
            code, headers, data = exchange.passed_on()
            exchange.answer(code, headers, data, upto=len(data) // 2)
        elif after:
            exchange.passed_on()
        exchange.reset()

    return act


def truncated(exchange: Exchange) -> None:
    """Send half of the body under the length of the half: only who knows what was asked notices."""
    code, headers, data = exchange.passed_on()
    exchange.answer(code, headers, data[: len(data) // 2])


def corrupt(exchange: Exchange) -> None:
    """Flip a bit in the middle of the body."""
    code, headers, data = exchange.passed_on()
    spoiled = bytearray(data)
    spoiled[len(spoiled) // 2] ^= 1
    exchange.answer(code, headers, bytes(spoiled))


def unconditional(exchange: Exchange) -> None:
    """Do what was asked whatever lies there, as stores do that do not know conditions."""
    exchange.headers = {
        n: v for n, v in exchange.headers.items() if n.lower() not in ("if-none-match", "if-match")
    }
    exchange.answer(*exchange.passed_on())


@final
class Cut:
    """Reset the connection when half of the request's own body has come."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.reset()


@final
class Stall:
    """Hold requests back, unanswered, until told to go on; `reached` says that one is held."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._go = threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        self.reached.set()
        self._go.wait(TIMEOUT_S)
        exchange.reset()

    def release(self) -> None:
        self._go.set()


@dataclass
class _Rule:
    method: str
    target: re.Pattern[str]
    fault: Fault
    left: int
    skip: int


@final
class Proxy:
    """Passes requests on to a store, except for those that were told to fail."""

    def __init__(self, behind: tuple[str, int]) -> None:
        self._behind = behind
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self.log: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with suppress(ConnectionError, BrokenPipeError, ValueError):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def _serve(self) -> None:
                proxy._serve(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="test-proxy", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail(self, method: str, target: str, fault: Fault, *, times: int = 1, skip: int = 0) -> None:
        """Have `times` requests fail, after `skip` of them, whose method and target (a pattern) match."""
        with self._lock:
            self._rules.append(_Rule(method, re.compile(target), fault, times, skip))

    def heal(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._rules.clear()

    def count(self, method: str, target: str) -> int:
        """How many such requests came."""
        with self._lock:
            return sum(method == m and re.search(target, t) is not None for m, t in self.log)

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "connection"}
        exchange = Exchange(handler.command, handler.path, headers, b"", self._behind, handler)
        fault = self._fault(exchange)
        exchange.body = handler.rfile.read(length // 2 if isinstance(fault, Cut) else length)
        if fault is not None:
            fault(exchange)
        else:
            exchange.answer(*exchange.passed_on())

    def _fault(self, exchange: Exchange) -> Fault | None:
        with self._lock:
            self.log.append((exchange.method, exchange.target))
            for rule in self._rules:
                if rule.left and rule.method == exchange.method and rule.target.search(exchange.target):
                    if rule.skip:
                        rule.skip -= 1
                        continue
                    rule.left -= 1
                    return rule.fault
        return None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(TIMEOUT_S)


@final
@dataclass
class FaultyStore:
    """A bucket of its own behind a proxy of its own."""

    bucket: str
    proxy: Proxy
    direct: str
    environment: dict[str, str] = field(default_factory=dict)

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    def fail(self, method: str, target: str, fault: Fault, *, times: int = 1, skip: int = 0) -> None:
        self.proxy.fail(method, target, fault, times=times, skip=skip)

    def options(self, **settings: float) -> StoreOptions:
        """As the environment says, with short deadlines."""
        return StoreOptions(**{"timeout_s": 2.0, "retry_s": 4.0, "hold_s": 3.0, **settings})  # type: ignore[arg-type]


def _request(address: str, method: str, target: str) -> None:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=TIMEOUT_S)
    try:
        connection.request(method, target)
        assert connection.getresponse().status == 200
    finally:
        connection.close()


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """moto's server on a thread of this process, and where it is."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield host, int(port)
    finally:
        server.stop()


@pytest.fixture(scope="session")
def moto_server() -> Iterator[tuple[str, int]]:
    """One S3 store for all tests of this process."""
    with served() as where:
        yield where


@pytest.fixture
def faulty(moto_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """An empty bucket behind a proxy; the environment leads obstore, here and in children, to it."""
    proxy = Proxy(moto_server)
    bucket = f"b-{uuid.uuid4().hex[:12]}"
    direct = f"http://{moto_server[0]}:{moto_server[1]}"
    _request(direct, "PUT", f"/{bucket}")
    environment = {
        "AWS_ENDPOINT_URL": proxy.address,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        yield FaultyStore(bucket, proxy, direct, environment)
    finally:
        proxy.close()
