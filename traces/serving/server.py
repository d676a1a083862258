"""A web server for the person at this machine: loopback only, read only, asked by our own pages alone.

A page of somewhere else must not be able to read a run through the browser of the person who looks at it.
So the server listens on 127.0.0.1, answers GET alone, refuses a request whose ``Host`` is not its own (which
a name that was rebound to 127.0.0.1 has), and one that a page of another site began.

Connections are limited in number and time: who sends or takes nothing for a while is let go, and where all
are in use, first the one that has been silent for longest.
"""

from __future__ import annotations

import html
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from foretrace.traces.errors import ServeError, TraceError, reason

LOOPBACK: Final = "127.0.0.1"
HTML: Final = "text/html; charset=utf-8"
JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"

_PROTOCOL: Final = "HTTP/1.1"
_PIECE_BYTES: Final = 1 << 20

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


MOST_CONNECTIONS: Final = 256
"""Connections that are served at a time; others wait until the system takes them."""

MOST_SILENT_S: Final = 10.0
"""Time in which a request must have come, 1 MiB of an answer been taken, or a browser asked again."""


class Gone(ConnectionError):  # noqa: N818 - it is no mistake of anybody
    """Who asked is no longer there: nobody needs the answer."""


class Query(dict[str, str]):
    """The query of a request, each name with its last value.

    Args:
        values: the query.
        connection: of the browser that asks; None where nobody does.
    """

    def __init__(self, values: Mapping[str, str], connection: socket.socket | None = None) -> None:
        super().__init__(values)
        self._connection = connection
        self.begun = b""  # what of the answer has been sent already

    def check(self) -> None:
        """Raise Gone if who asked has closed the connection; ask often in long work.

        Who will say nothing more may have gone, or wait for the answer, and TCP tells them apart only when
        something is sent. So the first byte is, which begins every answer: who is gone refuses it.
        """
        if self._connection is None:
            return
        try:
            poll = select.poll()  # select takes no descriptor above 1,023: a run may have as many files open
            poll.register(self._connection, select.POLLRDHUP)
            seen = sum(event for _, event in poll.poll(0))
            if seen & (select.POLLHUP | select.POLLERR):
                raise Gone
            if seen and not self.begun:
                self.begun = _PROTOCOL[:1].encode()
                self._connection.send(self.begun, socket.MSG_DONTWAIT)
        except OSError:
            raise Gone from None

    @contextmanager
    def holding(self, lock: threading.Lock) -> Iterator[None]:
        """Hold *lock*; wait for it only for as long as somebody waits for the answer."""
        while not lock.acquire(timeout=0.2):
            self.check()
        try:
            # Who asked may have gone while the lock was held by another.
            self.check()
            yield
        finally:
            lock.release()


class Answer(NamedTuple):
    """What a route answers."""

    body: bytes
    kind: str = HTML
    status: int = HTTPStatus.OK


Route = Callable[[Query], Answer]  # takes the query; it may give up with Gone


def page(text: str, status: int = HTTPStatus.OK) -> Answer:
    """Return an HTML page as an answer."""
    return Answer(text.encode("utf-8"), HTML, status)


def document_answer(document: Mapping[str, Any], columns: bytes = b"") -> Answer:
    """Return a document and its columns: four bytes of length (little-endian), JSON, columns as they are."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("utf-8")
    return Answer(len(text).to_bytes(4, "little") + text + columns, BINARY)


class Server(ThreadingHTTPServer):
    """Answers *routes* on the loopback address.

    Args:
        routes: by path.
        port: to listen on; 0 takes a free one.

    Raises:
        ServeError: the port is taken, or may not be used.
    """

    daemon_threads = True
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, routes: Mapping[str, Route], port: int = 0) -> None:
        self.routes = MappingProxyType(dict(routes))
        self._silent_since: dict[socket.socket, float | None] = {}
        self._changed = threading.Condition()
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ServeError(
                f"cannot listen on {LOOPBACK}:{port}: {reason(error)}; --port 0 takes a free one"
            ) from error

    @property
    def address(self) -> str:
        """Where a browser finds the server."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, once there is room for it."""
        with self._changed:
            while len(self._silent_since) >= MOST_CONNECTIONS:
                self._let_go(oldest=True)
                self._changed.wait(0.1)
            self._silent_since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and make room for another one."""
        with self._changed:
            self._silent_since.pop(request, None)
            self._changed.notify()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Let go of those that have been silent for too long; called twice a second."""
        super().service_actions()
        with self._changed:
            self._let_go(oldest=False)

    def listens(self, request: Any, *, waits: bool) -> None:
        """Note that it is up to the browser to go on, *waits*, or that it waits for an answer of ours."""
        with self._changed:
            if request in self._silent_since:
                self._silent_since[request] = time.monotonic() if waits else None

    def _let_go(self, *, oldest: bool) -> None:
        """End the connections that are silent for too long, or at least the *oldest* one that is."""
        since = {request: at for request, at in self._silent_since.items() if at is not None}
        late = [request for request, at in since.items() if at < time.monotonic() - MOST_SILENT_S]
        if oldest and since and not late:
            late = [min(since, key=since.__getitem__)]
        for request in late:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread sees the end, and closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away in the middle of an answer; report the rest."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def hosts(self) -> set[str]:
        """Return the values of ``Host`` that mean this server."""
        return {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version = "foretrace"
    sys_version = ""
    protocol_version = _PROTOCOL

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        self.server.listens(self.connection, waits=True)
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a page, or say in one line why not."""
        self.server.listens(self.connection, waits=False)
        if self.headers.get("Host", "").lower() not in self.server.hosts():
            self._send(_error(HTTPStatus.MISDIRECTED_REQUEST, "this server answers on its own address only"))
            return
        # A browser sends `none` for an address that a person typed in, `same-origin` for our own pages. A
        # program that is no browser sends nothing.
        if self.headers.get("Sec-Fetch-Site", "none") in ("cross-site", "same-site"):
            self._send(_error(HTTPStatus.FORBIDDEN, "a page of another site asked for this"))
            return
        asked = urlsplit(self.path)
        route = self.server.routes.get(asked.path)
        if route is None:
            self._send(_error(HTTPStatus.NOT_FOUND, f"there is no page {asked.path}"))
            return
        query = Query(dict(parse_qsl(asked.query, keep_blank_values=True)), self.connection)
        try:
            answer = route(query)
        except Gone:
            self.close_connection = True
            return
        except (TraceError, OSError) as error:  # of files that are moved or deleted meanwhile
            answer = _error(HTTPStatus.NOT_FOUND, reason(error))
        self._send(answer, begun=query.begun)

    def _send(self, answer: Answer, *, begun: bytes = b"") -> None:
        self.protocol_version = _PROTOCOL[len(begun) :]  # the answer begins with it
        self.send_response(answer.status)
        self.protocol_version = _PROTOCOL
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(0, len(answer.body), _PIECE_BYTES):  # so that each of them has its time
            self.server.listens(self.connection, waits=True)
            self.wfile.write(answer.body[at : at + _PIECE_BYTES])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is for what the person asked."""


def _error(status: int, message: str) -> Answer:
    text = html.escape(" ".join(message.split()))
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
    return page(f"<!doctype html><meta charset=utf-8>{policy}<title>foretrace</title><p>{text}</p>", status)
