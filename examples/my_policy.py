"""A policy in ten lines, for the command line:

preemptbench simulate --policy examples/my_policy.py:my_policy
"""

from contracts.policy import RunningView


def my_policy(view: RunningView) -> float:
    """Evict who would hold its place longest, less the prefill that the eviction wastes (s)."""
    holds_s = view.remaining * view.recent_tpot_s
    wasted_s = view.computed_tokens * view.prefill_s_per_token
    return holds_s - wasted_s


my_policy.reads_deadline = False
