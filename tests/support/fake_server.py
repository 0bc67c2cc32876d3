"""An engine without vLLM behind the routes of a vLLM server, for trainers on other hosts."""

from __future__ import annotations

import http.server
import json
import socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fake_engine import FakeEngine


class FakeServer(http.server.ThreadingHTTPServer):
    """Serves an engine at a port, on all addresses of its host, from a thread that `serve_forever` is given."""

    address_family = socket.AF_INET6
    daemon_threads = True

    def __init__(self, engine: FakeEngine, port: int) -> None:
        self.engine = engine
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
