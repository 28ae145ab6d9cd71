"""One JSON request over HTTP with the standard library: retries, backoff, bounded answers.

What is worth another try: no connection, a timeout, a broken answer, 408, 409, 425, 429 and 5xx.
Redirects are not followed, so a key never travels to another host.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from contracts.errors import CollectionStopped, InvalidInput
from contracts.randomness import keyed_uniform
from traces.safe_json import parse_json

MAX_ANSWER_BYTES = 64 << 20
_AGAIN = frozenset([408, 409, 425, 429])
_LONGEST_PAUSE_S = 60.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow nothing: the answer stays the 3xx it is."""


_OPENER = urllib.request.build_opener(_NoRedirect)


class HttpRefusal(InvalidInput):
    """A 3xx or 4xx answer that asking again would not change."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"HTTP {status}: {said}")
        self.status = status


class _TryAgain(Exception):
    def __init__(self, said: str, after_s: float = 0.0) -> None:
        super().__init__(said)
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class JsonClient:
    """How requests are made. ``attempts`` tries in all, pauses of ``pause_s`` doubling up to a
    minute, each shortened by up to half (keyed by ``seed``) so that clients do not march in step;
    a Retry-After of the server is kept. ``timeout_s`` bounds every single wait for bytes."""

    timeout_s: float = 600.0
    attempts: int = 6
    pause_s: float = 1.0
    seed: int = 0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a key
    sleep: Callable[[float], None] = time.sleep

    def ask(self, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """POST ``body`` (GET without one) and return the JSON object that comes back.

        Raises HttpRefusal, and CollectionStopped when every attempt failed.
        """
        check_url(url)
        waited_s = 0.0
        for attempt in range(self.attempts):
            try:
                return self._once(url, body)
            except _TryAgain as error:
                last = error
            if attempt + 1 < self.attempts:
                pause_s = self._pause_s(url, body, attempt, last.after_s)
                waited_s += pause_s
                self.sleep(pause_s)
        raise CollectionStopped(
            f"{url} gave no answer in {self.attempts} tries over {waited_s:.0f} s of waiting, the "
            f"last: {last}. Finished runs are safe; start the server and run the same command "
            "again, or raise --timeout if it is only slow"
        )

    def _pause_s(
        self, url: str, body: Mapping[str, Any] | None, attempt: int, after_s: float
    ) -> float:
        draw = keyed_uniform(self.seed, "http-retry", url, json.dumps(body), attempt)
        pause_s = min(self.pause_s * 2.0**attempt, _LONGEST_PAUSE_S) * (1.0 - draw / 2.0)
        return min(max(pause_s, after_s), _LONGEST_PAUSE_S)

    def _once(self, url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(url, data=data, headers=headers)
        try:
            with _OPENER.open(request, timeout=self.timeout_s) as answer:
                raw = answer.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            said = _said(error)
            if error.code in _AGAIN or error.code >= 500:
                raise _TryAgain(f"HTTP {error.code}: {said}", _retry_after_s(error)) from None
            raise HttpRefusal(error.code, said) from None
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            raise _TryAgain(f"{type(error).__name__}: {error}") from None
        if len(raw) > MAX_ANSWER_BYTES:
            raise InvalidInput(f"{url} answered over {MAX_ANSWER_BYTES} bytes: no completion is so")
        try:
            value = parse_json(raw.decode(errors="replace"), url)
        except InvalidInput as error:
            raise _TryAgain(str(error)) from None
        if not isinstance(value, dict):
            raise _TryAgain(f"{url} answered a {type(value).__name__}, not an object")
        return value


def check_url(url: str) -> None:
    """Refuse what is no plain http(s) address."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username
        good = good and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise InvalidInput(
            f"{url!r} is no address of a server: give it as http://HOST:PORT/v1, keys apart"
        )


def _said(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(2000).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        text = ""
    return " ".join(text.split())[:300] or str(error.reason)


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    try:
        return max(float(error.headers.get("Retry-After", "0")), 0.0)
    except ValueError:  # a date; the usual pause will do
        return 0.0
