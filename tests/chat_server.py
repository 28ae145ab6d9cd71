"""A small OpenAI-compatible server in a thread, whose every misdeed a test can order."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "served-model"
Answer = tuple[int, bytes, dict[str, str]]  # status, body, headers


def completion(text: str, tokens: int, reason: str = "stop", **fields: Any) -> Answer:
    """A good answer of ``tokens`` output tokens; ``fields`` replace top-level ones."""
    usage = {"prompt_tokens": 7, "completion_tokens": tokens}
    message = {"role": "assistant", "content": text}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage}
    return 200, json.dumps(body | fields).encode(), {}


class ChatServer:
    """What a test sees of the server: its address, the bodies it got, how many came at once."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer]) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.tries: Counter[str] = Counter()
        self.most_at_once = self._at_once = 0
        self.delay_s = 0.0
        self._lock = threading.Lock()
        self.url = ""

    def chat(self, body: dict[str, Any], key: str | None) -> Answer:
        prompt = body["messages"][0]["content"]
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self.tries[prompt] += 1
            number = self.tries[prompt]
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.delay_s)
        try:
            return self.answer(body, number)
        finally:
            with self._lock:
                self._at_once -= 1


@contextmanager
def chat_server(answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[ChatServer]:
    """Serve ``answer(body, which try of this prompt)`` until the block ends."""
    state = ChatServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            known = {
                "/v1/models": {"data": [{"id": MODEL, "owned_by": "vllm"}]},
                "/version": {"version": "0.33.0"},
            }
            body = known.get(self.path)
            self._send(200 if body else 404, json.dumps(body or {}).encode(), {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*state.chat(body, self.headers.get("Authorization")))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
