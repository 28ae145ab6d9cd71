"""The one definition of every progress signal: what a run shows about itself while it decodes.

A tracker is fed one token at a time (inside ``collect``, and inside a real engine) and closes a
record every ``stride`` tokens. Records never look ahead, so a predictor that reads records up to
age t knows nothing of what comes after t.
"""

from __future__ import annotations

from collections import deque

from contracts.errors import InvalidInput
from contracts.runs import ProgressRecord

# Words with which models signal a change of mind; matched against single-token pieces.
HESITATION_WORDS = frozenset(
    "wait hmm but actually however alternatively maybe perhaps mistake verify check again "
    "reconsider hold oops sorry instead".split()
)
REPETITION_NGRAM = 4
REPETITION_WINDOW_TOKENS = 64


def is_hesitation(piece: str) -> bool:
    """Say whether a token's text is one of :data:`HESITATION_WORDS`, case and space ignored."""
    return piece.strip().lower() in HESITATION_WORDS


class ProgressTracker:
    """The streaming state of one run's progress signals.

    ``think_open`` and ``think_close`` are token ids of the thinking marks, or None when the model
    has none; ``starts_thinking`` says that the prompt itself ended inside the thinking marks, as
    some chat templates do. Memory is bounded by the repetition window; an update is O(1).
    """

    def __init__(
        self,
        stride: int,
        think_open: int | None = None,
        think_close: int | None = None,
        *,
        starts_thinking: bool = False,
    ) -> None:
        if stride < 1:
            raise InvalidInput(f"progress stride is {stride}: it must be at least 1 token")
        self.stride = stride
        self.records: list[ProgressRecord] = []
        self.thinking_tokens = 0
        self._think_open, self._think_close = think_open, think_close
        self._in_thinking = starts_thinking
        self._num_tokens = 0
        self._sums = [0.0, 0.0, 0, 0]
        self._recent: deque[int] = deque(maxlen=REPETITION_NGRAM)
        self._grams: deque[tuple[int, ...]] = deque()
        self._gram_counts: dict[tuple[int, ...], int] = {}

    def update(self, token_id: int, piece: str, entropy: float, logprob: float) -> None:
        """Take one generated token: its id, its text, the entropy (nats) it was drawn from and
        its log-probability."""
        if token_id == self._think_open:
            self._in_thinking = True
        self.thinking_tokens += self._in_thinking
        if token_id == self._think_close:
            self._in_thinking = False
        sums = self._sums
        sums[0] += entropy
        sums[1] += logprob
        sums[2] += "\n" in piece
        sums[3] += is_hesitation(piece)
        self._remember(token_id)
        self._num_tokens += 1
        if self._num_tokens % self.stride == 0:
            self._close_record()

    def _remember(self, token_id: int) -> None:
        self._recent.append(token_id)
        if len(self._recent) < REPETITION_NGRAM:
            return
        gram = tuple(self._recent)
        self._grams.append(gram)
        self._gram_counts[gram] = self._gram_counts.get(gram, 0) + 1
        if len(self._grams) > REPETITION_WINDOW_TOKENS:
            old = self._grams.popleft()
            self._gram_counts[old] -= 1
            if not self._gram_counts[old]:
                del self._gram_counts[old]

    def _repetition(self) -> float:
        """Share of the window's n-grams that an earlier one in the window already showed."""
        if not self._grams:
            return 0.0
        return 1.0 - len(self._gram_counts) / len(self._grams)

    def _close_record(self) -> None:
        entropy, logprob, newlines, hesitations = (value / self.stride for value in self._sums)
        self.records.append(
            ProgressRecord(
                mean_entropy=entropy,
                mean_logprob=logprob,
                newline_rate=newlines,
                hesitation_rate=hesitations,
                repetition=self._repetition(),
                in_thinking=float(self._in_thinking),
            )
        )
        self._sums = [0.0, 0.0, 0, 0]
