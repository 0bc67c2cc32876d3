"""An engine without vLLM behind the routes of a vLLM server, for trainers on other hosts; and a load balancer."""

from __future__ import annotations

import http.client
import http.server
import itertools
import json
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fake_engine import FakeEngine

from weightsync.net.fence import HEADER, STATUS, refusal, write_refusal


class FakeServer(http.server.ThreadingHTTPServer):
    """Serves an engine at a port, on all addresses of its host, from a thread that `serve_forever` is given.

    fence: the file of the engine's fence. None: a server that has none, as one that `vllm serve` has started.
    """

    address_family = socket.AF_INET6
    daemon_threads = True

    def __init__(self, engine: FakeEngine, port: int, fence: str | None = None) -> None:
        self.engine, self.fence = engine, fence
        super().__init__(("::", port), _Handler)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.engine.close()

    def answer(self, route: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        engine = self.engine
        match route:
            case "/init_weight_transfer_engine":
                engine.init(body["init_info"])
            case "/start_weight_update":
                engine.start()
            case "/update_weights":
                engine.update(body["update_info"])
            case "/finish_weight_update":
                engine.finish(body["weight_version"])
            case "/sleep":
                engine.pause(query["mode"])
            case "/wake_up":
                engine.resume()
            case "/reset_prefix_cache":
                engine.reset_caches()
            case "/update_weight_version":
                engine.set_version(body["new_version"])
            case "/weight_info":
                return {"weight_version": engine.version()}
        return {}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        session, fence = self.headers.get(HEADER), self.server.fence
        if session and fence and (refused := refusal(fence, session)):
            status, answer = STATUS, write_refusal(refused)
        else:
            try:
                status, answer = 200, self.server.answer(parts.path, query, body)
            except Exception as error:
                status, answer = 500, {"error": {"message": str(error)}}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Balancer(http.server.ThreadingHTTPServer):
    """Brings each request at its port to the next one of several servers of this host, in turn."""

    daemon_threads = True

    def __init__(self, servers: Sequence[FakeServer]) -> None:
        self.ports = itertools.cycle([server.server_port for server in servers])
        super().__init__(("127.0.0.1", 0), _Forward)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Forward(http.server.BaseHTTPRequestHandler):
    server: Balancer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        connection = http.client.HTTPConnection("127.0.0.1", next(self.server.ports))
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
