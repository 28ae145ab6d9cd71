"""The jump engine's compiled loop: the step engine's decisions, without its steps.

Each function mirrors one of serving_sim/scheduler.py, blocks.py or engine.py, which say what it
does and why. What is new is :func:`_leap`: while all running requests decode and nobody can be
admitted, the steps up to the next finish, preemption or arrival differ in their seconds only.
Those are summed one by one in the step engine's order, so every time is equal bit for bit.

Soft KV needs no block identities, because a request frees its blocks last first: what survives of
them is a prefix, and the queue of soft blocks is a linked list of (request, blocks left).

Functions that call each other live in one file: numba's cache looks at a function's own file only,
so a change of a helper elsewhere would go unnoticed (kernels/deciding.py says how it crosses).
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
import numpy as np

from contracts.policy import FloatArray, IntArray
from serving_sim.kernels.surface import step_seconds

DONE, ASKS, STUCK, PAUSED, BROKEN = 0, 1, 2, 3, 4  # what :func:`advance` returns
NOT_ARRIVED, ACCEPTED, REFUSED, FINISHED = 0, 1, 2, 3  # status of a request
NATIVE_YOUNGEST, NATIVE_LEAST_URGENT, ASK = 0, 1, 2  # rule of an engine
NOBODY = -1
NUM_RECENT_STEPS = 32  # contracts.choice.TPOT_WINDOW_STEPS
ARRIVAL_SLACK_S = 1e-12  # engine.ARRIVAL_SLACK_S
PAUSE_WORK = 2_000_000  # requests looked at before Python may handle a Ctrl-C: below 0.1 s

_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")
_inner = numba.njit(nogil=True, error_model="numpy")
_SURFACE_SOURCE = int.from_bytes(
    blake2b(Path(__file__).with_name("surface.py").read_bytes(), digest_size=7).digest()
)


@_compiled
def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


# --- the waiting queue: a heap of key * n + request, FCFS and PRIORITY alike


@_compiled
def _push(engine: Any, requests: Any, waiting: IntArray, request: int, key: int) -> None:
    entry = (requests[request].rank if engine.is_priority else key) * len(requests) + request
    at = engine.num_waiting
    engine.num_waiting += 1
    while at > 0:
        parent = (at - 1) // 2
        if waiting[parent] <= entry:
            break
        waiting[at] = waiting[parent]
        at = parent
    waiting[at] = entry


@_compiled
def _pop(engine: Any, waiting: IntArray) -> None:
    engine.num_waiting -= 1
    count = engine.num_waiting
    entry = waiting[count]
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and waiting[child + 1] < waiting[child]:
            child += 1
        if entry <= waiting[child]:
            break
        waiting[at] = waiting[child]
        at = child
    waiting[at] = entry


# --- the block pool


@_compiled
def _unlink(engine: Any, requests: Any, request: int) -> None:
    """Take the soft blocks of ``request`` out of the queue."""
    before, after = requests[request].before, requests[request].after
    if before == NOBODY:
        engine.oldest = after
    else:
        requests[before].after = after
    if after == NOBODY:
        engine.newest = before
    else:
        requests[after].before = before


@_compiled
def _take(engine: Any, requests: Any, count: int) -> None:
    """Take ``count`` free blocks: blank ones first, then the soft ones freed longest ago."""
    engine.num_free -= count
    num_blank = min(engine.num_blank, count)
    engine.num_blank -= num_blank
    count -= num_blank
    while count > 0:
        owner = engine.oldest
        num_soft = min(requests[owner].soft_blocks, count)
        requests[owner].soft_blocks -= num_soft
        count -= num_soft
        if requests[owner].soft_blocks == 0:
            _unlink(engine, requests, owner)


@_compiled
def _release(engine: Any, requests: Any, request: int) -> None:
    own = requests[request]
    num_full = own.computed_tokens // engine.block_size if engine.caches else 0
    engine.num_free += own.num_blocks
    engine.num_blank += own.num_blocks - num_full
    own.num_blocks = 0
    if num_full > 0:
        own.soft_blocks = num_full
        own.before, own.after = engine.newest, NOBODY
        if engine.newest == NOBODY:
            engine.oldest = request
        else:
            requests[engine.newest].after = request
        engine.newest = request


@_compiled
def _missing_blocks(own: Any, tokens: int, block_size: int) -> int:
    """Return how many more blocks ``tokens`` more tokens need; mostly none, so don't divide."""
    beyond = own.computed_tokens + tokens - own.num_blocks * block_size
    return _ceil_div(beyond, block_size) if beyond > 0 else 0


# --- planning a step


@_compiled
def _chunk_limit(engine: Any) -> int:
    limit: int = engine.long_prefill_token_threshold
    if limit == 0 or engine.num_running + engine.num_waiting <= 1:
        limit = engine.max_num_batched_tokens
    return limit


@_compiled
def _choose_victim(engine: Any, requests: Any, running: IntArray) -> int:
    """Return a position in ``running``, or NOBODY when the caller has to ask the policy."""
    if engine.rule == ASK:
        answer: int = engine.victim_at
        engine.victim_at = NOBODY
        return answer
    worst: int = engine.num_running - 1
    if engine.rule == NATIVE_LEAST_URGENT:
        for at in range(engine.num_running - 2, -1, -1):
            own, other = requests[running[at]], requests[running[worst]]
            if own.priority > other.priority or (
                own.priority == other.priority and own.arrival_s >= other.arrival_s
            ):
                worst = at
    return worst


@_compiled
def _preempt(engine: Any, requests: Any, running: IntArray, waiting: IntArray, at: int) -> int:
    request: int = running[at]
    own = requests[request]
    engine.num_running -= 1
    for place in range(at, engine.num_running):
        running[place] = running[place + 1]
    engine.budget_tokens += own.scheduled_tokens
    own.scheduled_tokens = 0
    own.peak_computed_tokens = max(own.peak_computed_tokens, own.computed_tokens)
    _release(engine, requests, request)
    own.computed_tokens = 0
    own.num_preemptions += 1
    own.draw = np.nan
    own.evicted_at_s = engine.clock_s
    engine.num_preemptions += 1
    engine.has_preempted = 1
    # the last victim stands before all others
    _push(engine, requests, waiting, request, -engine.num_preemptions)
    return request


@_compiled
def _schedule_running(engine: Any, requests: Any, running: IntArray, waiting: IntArray) -> bool:
    """Return False when a victim is needed; the next call goes on where this one stopped."""
    chunk_limit = _chunk_limit(engine)
    while True:
        if engine.missing_blocks < 0:
            if engine.cursor >= engine.num_running or engine.budget_tokens <= 0:
                return True
            own = requests[running[engine.cursor]]
            engine.asked_tokens = min(
                own.known_tokens - own.computed_tokens, chunk_limit, engine.budget_tokens
            )
            engine.missing_blocks = _missing_blocks(own, engine.asked_tokens, engine.block_size)
        request = running[engine.cursor]
        is_gone = False
        while engine.missing_blocks > engine.num_free and not is_gone:
            at = _choose_victim(engine, requests, running)
            if at == NOBODY:
                return False
            is_gone = _preempt(engine, requests, running, waiting, at) == request
            if at < engine.cursor:
                engine.cursor -= 1
        if not is_gone:
            _take(engine, requests, engine.missing_blocks)
            requests[request].num_blocks += engine.missing_blocks
            requests[request].scheduled_tokens = engine.asked_tokens
            engine.budget_tokens -= engine.asked_tokens
            engine.cursor += 1
        engine.missing_blocks = -1


@_compiled
def _admissible_tokens(engine: Any, own: Any, budget_tokens: int) -> int:
    """Return the tokens that a waiting request would compute in this step; 0 if it must wait."""
    hit_tokens = own.soft_blocks * engine.block_size
    tokens: int = min(own.known_tokens - hit_tokens, _chunk_limit(engine))
    if not engine.chunks_prefill and tokens > budget_tokens:
        return 0
    tokens = min(tokens, budget_tokens)
    must_fit = own.known_tokens if engine.reserves_full_isl else hit_tokens + tokens
    spare = engine.watermark_blocks if engine.num_running > 0 else 0
    fits = _ceil_div(must_fit, engine.block_size) + spare <= engine.num_free
    return tokens if fits else 0


@_compiled
def _next_admission(engine: Any, requests: Any, waiting: IntArray, budget_tokens: int) -> int:
    """Return the tokens that the head of the queue would get; 0 when nobody is admitted."""
    if engine.num_waiting == 0 or budget_tokens <= 0 or engine.num_running >= engine.max_num_seqs:
        return 0
    tokens: int = _admissible_tokens(engine, requests[waiting[0] % len(requests)], budget_tokens)
    return tokens


@_compiled
def _schedule_waiting(engine: Any, requests: Any, running: IntArray, waiting: IntArray) -> None:
    if engine.has_preempted:
        return
    while True:
        tokens = _next_admission(engine, requests, waiting, engine.budget_tokens)
        if tokens == 0:
            return
        request = waiting[0] % len(requests)
        _pop(engine, waiting)
        _admit(engine, requests, request, tokens)
        running[engine.num_running] = request
        engine.num_running += 1
        engine.budget_tokens -= tokens


@_compiled
def _admit(engine: Any, requests: Any, request: int, tokens: int) -> None:
    own = requests[request]
    found = own.soft_blocks
    if found > 0:
        _unlink(engine, requests, request)
        own.soft_blocks = 0
        engine.num_free -= found
    hit_tokens = found * engine.block_size
    own.num_blocks = _ceil_div(hit_tokens + tokens, engine.block_size)
    _take(engine, requests, own.num_blocks - found)
    own.computed_tokens = hit_tokens
    own.cache_hit_tokens += hit_tokens
    own.admission_seq = engine.num_admissions
    engine.num_admissions += 1
    if np.isnan(own.first_scheduled_s):
        own.first_scheduled_s = engine.clock_s
    if not np.isnan(own.evicted_at_s):
        own.preempted_s += engine.clock_s - own.evicted_at_s
        own.evicted_at_s = np.nan
    own.scheduled_tokens = tokens


# --- running a step, or many


@_inner
def _pass_time(
    engine: Any,
    recent_steps_s: FloatArray,
    tables: FloatArray,
    prefill: int,
    prefill_context: int,
    decodes: int,
    decode_context: int,
    count: int,
    longest: int,
) -> None:
    """Let a step take its time: a surface's if there are tables, else that of AffineProfile.step_s,
    the sum's order included."""
    if len(tables):
        step_s = float(
            step_seconds(tables, prefill, prefill_context, decodes, decode_context, count, longest)
        )
        _note_reach(engine, prefill, prefill_context, decodes, decode_context, count)
    else:
        step_s = (
            engine.fixed_s
            + engine.per_token_s * (prefill + decodes)
            + engine.per_context_token_s * (prefill_context + decode_context)
            + engine.per_request_s * count
        )
    engine.clock_s += step_s
    if engine.checks and step_s < 0.0:
        engine.is_broken = 1  # law: the clock never falls
    recent_steps_s[engine.num_timed_steps % NUM_RECENT_STEPS] = step_s
    engine.num_timed_steps += 1


@_compiled
def _note_reach(
    engine: Any,
    prefill: int,
    prefill_context: int,
    decodes: int,
    decode_context: int,
    count: int,
) -> None:
    """Keep the largest of each quantity that a surface was measured over."""
    engine.most_tokens = max(engine.most_tokens, prefill + decodes)
    engine.most_chunk = max(engine.most_chunk, prefill)
    engine.most_decodes = max(engine.most_decodes, decodes)
    if count > decodes:
        prefix = (prefill_context - prefill) / (count - decodes)
        engine.most_prefix = max(engine.most_prefix, prefix)
    if decodes > 0:
        engine.most_context = max(engine.most_context, decode_context / decodes)


@_compiled
def _check_blocks(engine: Any, num_held: int) -> None:
    """Law: free + used = total."""
    if engine.checks and num_held + engine.num_free != engine.usable_blocks:
        engine.is_broken = 1


@_inner
def _compute(
    engine: Any,
    requests: Any,
    running: IntArray,
    recent_steps_s: FloatArray,
    tables: FloatArray,
) -> None:
    """Run the planned step: its tokens are computed, its time passes, outputs appear."""
    prefill = prefill_context = decodes = decode_context = longest = 0
    count = num_outputs = num_finished = num_held = 0
    for at in range(engine.num_running):
        own = requests[running[at]]
        num_held += own.num_blocks
        if own.scheduled_tokens == 0:
            continue
        before = own.computed_tokens
        own.computed_tokens += own.scheduled_tokens
        if own.scheduled_tokens == 1:
            decodes += 1
            decode_context += own.computed_tokens
            longest = max(longest, own.computed_tokens)
        else:
            prefill += own.scheduled_tokens
            prefill_context += own.computed_tokens
        count += 1
        again = min(own.computed_tokens, own.peak_computed_tokens) - before
        if again > 0:
            own.recomputed_tokens += again
            engine.recomputed_tokens += again
    _check_blocks(engine, num_held)
    engine.num_steps += 1
    engine.computed_tokens += prefill + decodes
    if count > 0:
        _pass_time(
            engine, recent_steps_s, tables, prefill, prefill_context, decodes, decode_context,
            count, longest,
        )  # fmt: skip
    for at in range(engine.num_running):
        own = requests[running[at]]
        if own.scheduled_tokens > 0 and own.computed_tokens >= own.known_tokens:
            num_outputs += 1
            own.known_tokens += 1
            own.generated_tokens += 1
            if own.generated_tokens == 1:
                own.first_token_s = engine.clock_s
            num_finished += own.generated_tokens >= own.output_tokens
        own.scheduled_tokens = 0
    engine.idle_steps = 0 if num_outputs > 0 else engine.idle_steps + 1
    if num_finished > 0:
        _retire_finished(engine, requests, running)


@_compiled
def _retire_finished(engine: Any, requests: Any, running: IntArray) -> None:
    keep = 0
    for at in range(engine.num_running):
        request = running[at]
        own = requests[request]
        if own.generated_tokens < own.output_tokens:
            running[keep] = request
            keep += 1
        else:
            own.status = FINISHED
            own.end_s = engine.clock_s
            engine.num_awaited -= own.is_awaited
            _release(engine, requests, request)
    engine.num_running = keep


@_compiled
def _goes_on(engine: Any) -> bool:
    return bool(engine.num_awaited > 0 and engine.clock_s <= engine.horizon_s)


@_compiled
def _is_due(engine: Any, requests: Any) -> bool:
    at = engine.next_arrival
    due_s = engine.clock_s + ARRIVAL_SLACK_S
    return bool(at < len(requests) and requests[at].arrival_s <= due_s)


@_compiled
def _affordable_steps(num_asking: IntArray, count: int, num_free: int) -> int:
    """Return how many steps ``count`` decodes can take in ``num_free`` blocks.

    ``num_asking[s]`` of them have room for s tokens in their last block: they ask for another
    one after s steps, and again every block_size steps.
    """
    block_size = len(num_asking)
    left = num_free % count
    for step in range(block_size):
        left -= num_asking[step]
        if left < 0:
            return num_free // count * block_size + step
    return num_free // count * block_size  # not reached: all ask once in block_size steps


@_inner
def _leap(
    engine: Any,
    requests: Any,
    running: IntArray,
    waiting: IntArray,
    recent_steps_s: FloatArray,
    num_asking: IntArray,
    tables: FloatArray,
) -> bool:
    """Take as many steps at once as are alike; return False if the next must be planned.

    A head of the queue that is refused now stays refused: decoding takes blocks and frees none,
    and a soft block that it loses lowers what it needs by no more than that.
    """
    count = engine.num_running
    budget_left = engine.max_num_batched_tokens - count
    if count == 0 or budget_left < 0 or engine.has_run_out:
        engine.has_run_out = 0
        return False
    if _next_admission(engine, requests, waiting, budget_left) > 0:
        return False
    num_asking[:] = 0
    context = longest = num_held = 0
    until_end = requests[running[0]].output_tokens
    for at in range(count):
        own = requests[running[at]]
        if own.computed_tokens != own.known_tokens - 1 or own.generated_tokens == 0:
            return False
        until_end = min(until_end, own.output_tokens - own.generated_tokens)
        room = own.num_blocks * engine.block_size - own.computed_tokens
        num_asking[room] += 1
        num_held += own.num_blocks
        context += own.computed_tokens
        longest = max(longest, own.computed_tokens)
    _check_blocks(engine, num_held)
    most = min(until_end, _affordable_steps(num_asking, count, engine.num_free))
    steps = 0
    while steps < most:
        steps += 1
        context += count
        longest += 1
        _pass_time(engine, recent_steps_s, tables, 0, 0, count, context, count, longest)
        if _is_due(engine, requests) or not _goes_on(engine):
            break
    if steps > 0:
        _decode(engine, requests, running, steps)
    if steps == until_end:
        _retire_finished(engine, requests, running)
    elif steps == most > 0:
        engine.has_run_out = 1  # of blocks: the next step must be planned, don't look at all again
    return steps > 0


@_compiled
def _decode(engine: Any, requests: Any, running: IntArray, steps: int) -> None:
    """Let every running request write ``steps`` tokens."""
    num_taken = 0
    for at in range(engine.num_running):
        own = requests[running[at]]
        own.known_tokens += steps
        own.generated_tokens += steps
        missing = _missing_blocks(own, steps, engine.block_size)
        own.computed_tokens += steps
        own.num_blocks += missing
        num_taken += missing
    _take(engine, requests, num_taken)
    engine.num_steps += steps
    engine.computed_tokens += steps * engine.num_running
    engine.idle_steps = 0


@_compiled
def _admit_arrivals(engine: Any, requests: Any, waiting: IntArray) -> None:
    while _is_due(engine, requests):
        request = engine.next_arrival
        engine.next_arrival += 1
        own = requests[request]
        if own.is_refused:
            own.status = REFUSED
            own.end_s = own.arrival_s
            engine.num_awaited -= own.is_awaited
        else:
            own.status = ACCEPTED
            _push(engine, requests, waiting, request, request + 1)


def _make_advance(sources: int) -> Any:
    @_compiled
    def advance(
        engines: Any,
        requests: Any,
        running: IntArray,
        waiting: IntArray,
        recent_steps_s: FloatArray,
        num_asking: IntArray,
        tables: FloatArray,
    ) -> int:
        """Run until the end (DONE), until a policy must name a victim (ASKS: put its position into
        ``victim_at`` and call again), until nothing progresses (STUCK), until a law does not hold
        (BROKEN), or for a while (PAUSED: call again).

        ``engines`` (1,) is of dtype ENGINE, ``requests`` (n,) of REQUEST in order of arrival;
        ``running`` and ``waiting`` (n,) are scratch, as is ``num_asking`` (block_size,).
        ``tables`` are a SurfaceProfile's, or empty: the profile is affine then.
        """
        _ = sources
        engine = engines[0]
        while True:
            if not engine.is_planning:
                if engine.is_broken:
                    return BROKEN
                if not _goes_on(engine):
                    return DONE
                engine.work += 1 + engine.num_running
                if engine.work > PAUSE_WORK:
                    engine.work = 0
                    return PAUSED
                _admit_arrivals(engine, requests, waiting)
                if engine.num_running == 0 and engine.num_waiting == 0:
                    if engine.next_arrival < len(requests):
                        engine.clock_s = requests[engine.next_arrival].arrival_s
                    continue
                if _leap(engine, requests, running, waiting, recent_steps_s, num_asking, tables):
                    continue
                engine.is_planning = 1
                engine.cursor = engine.has_preempted = 0
                engine.missing_blocks = engine.victim_at = -1
                engine.budget_tokens = engine.max_num_batched_tokens
            if not _schedule_running(engine, requests, running, waiting):
                engine.work += engine.num_running
                return ASKS
            _schedule_waiting(engine, requests, running, waiting)
            _compute(engine, requests, running, recent_steps_s, tables)
            engine.is_planning = 0
            if engine.idle_steps > engine.max_idle_steps:
                return STUCK

    return advance


advance = _make_advance(_SURFACE_SOURCE)
