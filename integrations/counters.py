"""What a deployed victim rule did: counters, as Prometheus text and as one log line."""

from __future__ import annotations

from dataclasses import dataclass, fields

_HELP = {
    "steps": "Steps planned.",
    "preemptions": "Requests evicted because KV ran out.",
    "decisions": "Victims chosen.",
    "unlike_lifo": "Decisions whose victim was not the one that LIFO would have evicted.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "predictor_calls": "Calls of the predictor.",
    "predictor_rows": "Requests that the predictor answered for.",
    "predictor_seconds": "Wall seconds spent in the predictor.",
    "decision_seconds": "Wall seconds spent choosing victims, the predictor included.",
    "old_answers": "Decisions that used an answer one refresh old: the budget was spent.",
    "without_logprobs": "Requests without the log-probabilities that the predictor reads.",
    "fallback_error": "Decisions left to the fallback: the predictor or the policy raised.",
    "fallback_unsound": "Decisions that met an answer or score that is NaN or no length.",
    "fallback_late": "Decisions left to the fallback: the predictor's budget was spent.",
}


@dataclass(slots=True)
class Counters:
    """Totals since the start; ``predictor_worst_s`` is the longest single call."""

    steps: int = 0
    preemptions: int = 0
    decisions: int = 0
    unlike_lifo: int = 0
    recomputed_tokens: int = 0
    predictor_calls: int = 0
    predictor_rows: int = 0
    predictor_seconds: float = 0.0
    decision_seconds: float = 0.0
    old_answers: int = 0
    without_logprobs: int = 0
    fallback_error: int = 0
    fallback_unsound: int = 0
    fallback_late: int = 0
    predictor_worst_s: float = 0.0

    @property
    def fallbacks(self) -> int:
        """Decisions that the policy did not make, or made on less than all it asked for."""
        return self.fallback_error + self.fallback_unsound + self.fallback_late

    def prometheus(self, policy: str) -> str:
        """Return the text exposition format, one counter a field."""
        label = '{policy="' + policy.replace("\\", r"\\").replace('"', r"\"") + '"}'
        lines = []
        for name, text in _HELP.items():
            metric = f"preemptbench_{name}_total"
            lines += [
                f"# HELP {metric} {text}",
                f"# TYPE {metric} counter",
                f"{metric}{label} {getattr(self, name)}",
            ]
        metric = "preemptbench_predictor_worst_seconds"
        lines += [f"# HELP {metric} Longest call of the predictor.", f"# TYPE {metric} gauge"]
        lines.append(f"{metric}{label} {self.predictor_worst_s}")
        return "\n".join(lines) + "\n"

    def line(self, policy: str) -> str:
        """Return the same for a log."""
        mean_us = 1e6 * self.predictor_seconds / max(1, self.predictor_calls)
        return (
            f"victims by {policy}: {self.preemptions} preemptions in {self.steps} steps, "
            f"{self.unlike_lifo} of {self.decisions} victims not LIFO's, {self.recomputed_tokens} "
            f"tokens recomputed; predictor {self.predictor_calls} calls, mean {mean_us:.0f} us, "
            f"worst {1e6 * self.predictor_worst_s:.0f} us; {self.fallbacks} fallbacks "
            f"({self.fallback_error} errors, {self.fallback_unsound} unsound, "
            f"{self.fallback_late} late)"
        )

    def as_dict(self) -> dict[str, float]:
        """Return the totals by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
