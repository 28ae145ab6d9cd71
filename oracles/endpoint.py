"""Any server with an OpenAI-compatible chat endpoint (vLLM, SGLang, ...) as a backend.

The server batches; we bound how many requests are in flight and record how many there were when
each was sent. Such a server shows no entropies and no hidden states, so rows have no progress
signals, and what it does not say about itself is recorded as unknown.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from contracts.errors import InvalidInput
from contracts.loops import loop_period
from contracts.runs import FinishReason
from oracles.backend import DecodeSettings, EngineFacts, Generation, Outcomes, Refused
from oracles.http_json import HttpRefusal, JsonClient, check_url
from oracles.workers import run_bounded
from traces.import_rules import CHARS_PER_4

API_KEY_VARIABLE = "PREEMPTBENCH_API_KEY"
UNKNOWN = "unknown"
_CHAT = "/chat/completions"
_NO_SUCH = frozenset([401, 403, 404, 405])  # wrong key, address or model: no prompt will do better
_REASONS: dict[str, FinishReason] = {
    "stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop",
    "content_filter": "abort", "abort": "abort", "error": "error",
}  # fmt: skip


def key_headers(variable: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the Authorization header with the key in the environment variable, if it is set."""
    key = environment.get(variable, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


class Endpoint:
    """The backend that asks ``url`` (``http://HOST:PORT/v1``) for chat completions of ``model``.

    Asks the server who it is at once: raises InvalidInput when it serves other models, and
    CollectionStopped when nobody answers. ``batch_invariant``, ``dtype`` and ``revision`` are the
    caller's word for what the server does not tell.
    """

    flows = True

    def __init__(
        self,
        url: str,
        model: str,
        client: JsonClient | None = None,
        *,
        batch_invariant: bool = False,
        dtype: str = UNKNOWN,
        revision: str = UNKNOWN,
    ) -> None:
        self._url = url.rstrip("/").removesuffix(_CHAT)
        check_url(self._url)
        self._client = client or JsonClient(headers=key_headers(API_KEY_VARIABLE))
        owner = _owner(self._client, self._url, model)
        self.facts = EngineFacts(
            model=model,
            model_revision=revision,
            tokenizer_sha256=UNKNOWN,
            chat_template_sha256=UNKNOWN,
            engine=f"endpoint:{owner}",
            engine_version=_version(self._client, self._url),
            kernel=UNKNOWN,
            batch_invariant=batch_invariant,
            dtype=dtype,
            device=UNKNOWN,
        )

    def check(self, settings: DecodeSettings) -> None:
        """Raise InvalidInput for what no endpoint can do."""
        if settings.hidden_layers or settings.stop_loops:
            raise InvalidInput(
                "an endpoint shows no hidden states and cannot be stopped at a loop: leave out "
                "--hidden-layers and --stop-loops, or run the model here"
            )

    def refuses(self, prompt: str, max_new_tokens: int) -> str | None:  # noqa: ARG002
        """Return None: only the server can tell."""
        return None

    def run(self, prompts: Sequence[str], size: int, settings: DecodeSettings) -> Outcomes:
        """Yield outcomes in the order they arrive; at most ``size`` requests are in flight."""
        tasks = [functools.partial(self._ask, prompt, settings) for prompt in prompts]
        yield from run_bounded(tasks, size)

    def _ask(self, prompt: str, settings: DecodeSettings, concurrency: int) -> Generation | Refused:
        body = {
            "model": self.facts.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "seed": settings.seed,
            "max_tokens": settings.max_new_tokens,
            "stream": False,
        }
        started = time.perf_counter()
        try:
            answer = self._client.ask(self._url + _CHAT, body)
        except HttpRefusal as error:
            if error.status in _NO_SUCH:
                raise InvalidInput(f"{self._url}{_CHAT} refuses: {error}") from None
            return Refused(f"the server refuses it: {error}")
        wall_s = time.perf_counter() - started
        return _generation(answer, prompt, settings.max_new_tokens, wall_s, concurrency)


def _generation(
    answer: Mapping[str, Any], prompt: str, cap: int, wall_s: float, concurrency: int
) -> Generation | Refused:
    choices = answer.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        return Refused("the server's answer holds no choice")
    text = _text_of(choices[0].get("message"))
    counts, how_counted = _counts(answer.get("usage"), prompt, text, cap)
    if counts[1] > cap:
        return Refused(f"the server wrote {counts[1]} tokens past max_tokens {cap}: it ignores it")
    reason = _REASONS.get(str(choices[0].get("finish_reason")), "unknown")
    if reason == "length" and _loops(text):
        reason = "loop"
    elif reason == "length" and counts[1] < cap and how_counted == "usage":
        reason = "abort"  # the server's own bound cut it, not the cap
    return Generation(
        prompt_tokens=counts[0],
        output_tokens=counts[1],
        thinking_tokens=counts[2],
        finish_reason=reason,
        text=text,
        wall_s=wall_s,
        concurrency=concurrency,
        how_counted=how_counted,
    )


def _text_of(message: object) -> str:
    """Return what the model wrote: reasoning, where the server parts it off, then the answer."""
    fields = message if isinstance(message, dict) else {}
    parts = [fields.get(name) for name in ("reasoning_content", "reasoning", "content")]
    return "\n".join(dict.fromkeys(part for part in parts if isinstance(part, str) and part))


def _counts(
    usage: object, prompt: str, text: str, cap: int
) -> tuple[tuple[int, int, int | None], str]:
    """Return (prompt, output, thinking tokens) and who counted them."""
    fields = usage if isinstance(usage, dict) else {}
    sent, written = fields.get("prompt_tokens"), fields.get("completion_tokens")
    if not (_whole(sent) and _whole(written)):
        guess = min(max(CHARS_PER_4.count(text), 1), cap)
        return (CHARS_PER_4.count(prompt), guess, None), f"{CHARS_PER_4.label}, no usage sent"
    details = fields.get("completion_tokens_details")
    thought = details.get("reasoning_tokens") if isinstance(details, dict) else None
    # a run that ends at once wrote its end-of-sequence token at least, whatever the server counts
    return (max(sent, 1), max(written, 1), thought if _whole(thought) else None), "usage"


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _loops(text: str) -> bool:
    """The loop test on words, for want of token ids."""
    words = text.split()
    number = {word: index for index, word in enumerate(dict.fromkeys(words))}
    return loop_period([number[word] for word in words]) is not None


def _owner(client: JsonClient, url: str, model: str) -> str:
    """Return who serves ``model``, as the server's list of models says."""
    try:
        rows = client.ask(f"{url}/models").get("data")
    except HttpRefusal as error:
        if error.status in (401, 403):
            raise InvalidInput(
                f"{url}/models refuses ({error}): put the key into {API_KEY_VARIABLE}"
            ) from None
        return UNKNOWN  # not every server lists its models
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = [str(row.get("id")) for row in rows]
    if names and model not in names:
        raise InvalidInput(f"{url} does not serve {model!r}: choose one of {', '.join(names)}")
    return next(
        (str(row.get("owned_by") or UNKNOWN) for row in rows if row["id"] == model), UNKNOWN
    )


def _version(client: JsonClient, url: str) -> str:
    """Return the version vLLM (and some others) tell at /version of the host, else unknown."""
    parts = urlsplit(url)
    try:
        said = client.ask(f"{parts.scheme}://{parts.netloc}/version").get("version")
    except HttpRefusal:
        return UNKNOWN
    return said if isinstance(said, str) and said else UNKNOWN
