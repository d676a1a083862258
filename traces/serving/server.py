"""A web server for the person at this machine: loopback only, read only, asked by our own pages alone.

A page of somewhere else must not be able to read a run through the browser of the person who looks at it.
So the server listens on 127.0.0.1, answers GET alone, refuses a request whose ``Host`` is not its own (which
a name that was rebound to 127.0.0.1 has), and one that a page of another site began.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Mapping
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

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Answer(NamedTuple):
    """What a route answers."""

    body: bytes
    kind: str = HTML
    status: int = HTTPStatus.OK


Route = Callable[[Mapping[str, str]], Answer]
"""Takes the query, each name with its last value."""


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

    def __init__(self, routes: Mapping[str, Route], port: int = 0) -> None:
        self.routes = MappingProxyType(dict(routes))
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
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a page, or say in one line why not."""
        if self.headers.get("Host", "").lower() not in self.server.hosts():
            self._send(_error(HTTPStatus.MISDIRECTED_REQUEST, "this server answers on its own address only"))
            return
        if self.headers.get("Sec-Fetch-Site", "none") in ("cross-site", "same-site"):
            self._send(_error(HTTPStatus.FORBIDDEN, "a page of another site asked for this"))
            return
        asked = urlsplit(self.path)
        route = self.server.routes.get(asked.path)
        if route is None:
            self._send(_error(HTTPStatus.NOT_FOUND, f"there is no page {asked.path}"))
            return
        try:
            answer = route(dict(parse_qsl(asked.query, keep_blank_values=True)))
        except (TraceError, OSError) as error:  # of files that are moved or deleted meanwhile
            answer = _error(HTTPStatus.NOT_FOUND, reason(error))
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal is for what the person asked."""


def _error(status: int, message: str) -> Answer:
    text = html.escape(" ".join(message.split()))
    return page(f"<!doctype html><meta charset=utf-8><title>foretrace</title><p>{text}</p>", status)
