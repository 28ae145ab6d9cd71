"""Logs of other tools with fixed fields: OpenAI responses, lm-evaluation-harness, vLLM bench.

Field names were checked against public logs and the tools' sources: OpenAI chat completions and
batch results, lm-evaluation-harness ``--log_samples``, ``vllm bench serve --save-detailed``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from traces.import_rules import ForeignRow, Tally, TokenCounter
from traces.safe_json import iter_jsonl, read_json


def _openai_rows(path: Path, counter: TokenCounter, tally: Tally) -> Iterator[ForeignRow]:
    """One JSON object a line: a response, {request, response}, or a batch-API result."""
    for number, row in iter_jsonl(path):
        where = f"{path} line {number}"
        reply, request = _reply_of(row), _dict(row.get("request"))
        choices = reply.get("choices")
        if row.get("error") or not isinstance(choices, list) or not choices:
            tally.skipped["an error, or no choices"] += 1
            continue
        if len(choices) != 1 or not isinstance(choices[0], dict):
            tally.skipped["several choices share one usage"] += 1
            continue
        usage = _dict(reply.get("usage"))
        message = _dict(choices[0].get("message"))
        text = message.get("content") or choices[0].get("text")
        output_tokens = usage.get("completion_tokens")
        if output_tokens is None:
            tally.decided[f"no usage.completion_tokens: text counted by {counter.label}"] += 1
        details = _dict(usage.get("completion_tokens_details"))
        prompt = _prompt_of(request)
        yield ForeignRow(
            where,
            {
                "prompt": prompt,
                "prompt_id": row.get("custom_id") or (None if prompt else reply.get("id")),
                "model": reply.get("model") or request.get("model"),
                "temperature": request.get("temperature"),
                "seed": request.get("seed"),
                "max_new_tokens": request.get("max_completion_tokens") or request.get("max_tokens"),
                "prompt_tokens": usage.get("prompt_tokens"),
                "output_tokens": counter.count(text or "")
                if output_tokens is None
                else output_tokens,
                "how_counted": counter.label if output_tokens is None else "reported",
                "thinking_tokens": details.get("reasoning_tokens"),
                "finish_reason": choices[0].get("finish_reason"),
                "text": text,
                "engine": "openai-api",
            },
        )


def _reply_of(row: dict[str, Any]) -> dict[str, Any]:
    reply = _dict(row.get("response")) or row
    return _dict(reply.get("body")) or reply


def _prompt_of(request: dict[str, Any]) -> str | None:
    messages = request.get("messages")
    if not isinstance(messages, list):
        return request["prompt"] if isinstance(request.get("prompt"), str) else None
    if len(messages) == 1 and isinstance(_dict(messages[0]).get("content"), str):
        return str(messages[0]["content"])
    return json.dumps(messages, sort_keys=True, ensure_ascii=False)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _lm_eval_rows(path: Path, counter: TokenCounter, tally: Tally) -> Iterator[ForeignRow]:
    """``samples_<task>_<date>.jsonl``: one line per document and filter, texts in ``resps``.

    A text ends where the harness cut it (``until``), so its count is a lower bound."""
    found = re.fullmatch(r"samples_(.+?)(_\d{4}-\d\d-\d\dT[\d\-:.]+)?", path.stem)
    task = found.group(1) if found else path.stem
    seen: set[str] = set()
    for number, row in iter_jsonl(path):
        document = str(row.get("doc_id"))
        if document in seen:
            tally.skipped["the same document under another filter"] += 1
            continue
        seen.add(document)
        prompt, settings = _lm_eval_request(row.get("arguments"))
        texts = row.get("resps")
        texts = texts[0] if isinstance(texts, list) and texts else []
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            tally.skipped["not generated text (log-likelihoods)"] += 1
            continue
        for text in texts:
            yield ForeignRow(
                f"{path} line {number}",
                {
                    "benchmark": task,
                    "prompt_id": document,
                    "prompt": prompt,
                    "prompt_tokens": counter.count(prompt) if prompt else None,
                    "output_tokens": counter.count(text),
                    "text": text,
                    "how_counted": counter.label,
                    "temperature": settings.get("temperature", 0.0),
                    "max_new_tokens": _first(
                        settings, "max_gen_toks", "max_new_tokens", "max_tokens"
                    ),
                    "engine": "lm-evaluation-harness",
                },
            )


def _lm_eval_request(arguments: Any) -> tuple[str | None, dict[str, Any]]:
    """Return (prompt, generation settings) from ``[[prompt, {…}]]`` or its gen_args_0 form."""
    if isinstance(arguments, dict):
        first = _dict(arguments.get("gen_args_0"))
        pair = [first.get("arg_0"), first.get("arg_1")]
    else:
        pair = arguments[0] if isinstance(arguments, list) and arguments else [None]
        pair = pair if isinstance(pair, list) else [pair]
    prompt = pair[0]
    if isinstance(prompt, list):  # a chat: one JSON text, or the messages
        prompt = prompt[0] if len(prompt) == 1 and isinstance(prompt[0], str) else prompt
    if prompt is not None and not isinstance(prompt, str):
        prompt = json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return prompt, _dict(pair[1]) if len(pair) > 1 else {}


def _first(values: dict[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _vllm_rows(path: Path, _counter: TokenCounter, tally: Tally) -> Iterator[ForeignRow]:
    """One JSON object with a list per column. Prompts are not in it: request i of a data set is
    named by i, so several files of one data set and seed are repeats of each other."""
    log = read_json(path)
    if not isinstance(log.get("output_lens"), list):
        raise InvalidInput(f"{path} has no list 'output_lens': run the bench with --save-detailed")
    lengths: list[Any] = log["output_lens"]
    columns: dict[str, list[Any]] = {}
    for name in ("input_lens", "generated_texts", "ttfts", "itls", "errors"):
        column = log.get(name) or [None] * len(lengths)
        if not isinstance(column, list) or len(column) != len(lengths):
            raise InvalidInput(
                f"{path}: {name} is not a list of {len(lengths)} entries, as output_lens is"
            )
        columns[name] = column
    for i, output_tokens in enumerate(lengths):
        if columns["errors"][i]:
            tally.skipped["the request failed"] += 1
            continue
        yield ForeignRow(
            f"{path} request {i}",
            {
                "prompt_id": str(i),
                "prompt_tokens": columns["input_lens"][i],
                "output_tokens": output_tokens,
                "text": columns["generated_texts"][i],
                "wall_s": _wall_s(columns["ttfts"][i], columns["itls"][i]),
                "model": log.get("model_id"),
                "concurrency": log.get("max_concurrency"),
                "engine": log.get("backend") or log.get("endpoint_type") or "vllm",
            },
        )


def _wall_s(ttft: Any, gaps: Any) -> float | None:
    numbers = [ttft, *(gaps if isinstance(gaps, list) else [])]
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    return float(sum(numbers))


LOG_FORMATS: dict[str, Callable[[Path, TokenCounter, Tally], Iterator[ForeignRow]]] = {
    "openai": _openai_rows,
    "lm-eval": _lm_eval_rows,
    "vllm-bench": _vllm_rows,
}
