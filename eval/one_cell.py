"""One cell of a matrix, run again with somebody listening to its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from contracts.errors import InvalidInput
from eval.cells import Cell
from eval.matrix import prepare_seed, run_cell, source_runs
from eval.matrix_config import MatrixConfig, Pressure
from eval.signal_sources import NO_SIGNAL
from serving_sim.engine import SimResult, StepLog


@dataclass(frozen=True, slots=True)
class OneCell:
    """Which cell; ``signal`` is NO_SIGNAL for a policy that reads none."""

    policy: str
    signal: str
    pressure: Pressure
    seed: int

    @property
    def title(self) -> str:
        """What a reader needs to find the cell again."""
        signal = "" if self.signal == NO_SIGNAL else f", signal {self.signal}"
        return f"policy {self.policy}{signal}, {self.pressure.num_blocks} blocks, seed {self.seed}"


def only_cell(config: MatrixConfig, policy: str, seed: int) -> OneCell:
    """Return the one cell of ``policy`` and ``seed``; InvalidInput when there are several."""
    last_seed = config.first_seed + config.num_seeds - 1
    if not config.first_seed <= seed <= last_seed:
        raise InvalidInput(
            f"seed {seed} is not in the matrix: choose one of {config.first_seed} to {last_seed}"
        )
    signals = [signal.name for name, signal in config.crossings() if name == policy]
    pressures = [pressure.num_blocks for pressure in config.pressures]
    for kind, names, option in (
        ("pool sizes", pressures, "--blocks"),
        ("signals", signals, "--signal"),
    ):
        if len(names) > 1:
            raise InvalidInput(
                f"a timeline shows one cell, but policy {policy!r} meets {len(names)} {kind} "
                f"({', '.join(map(str, names))}): give {option} once"
            )
    return OneCell(policy, signals[0], config.pressures[0], seed)


def run_one_cell(
    config: MatrixConfig, which: OneCell, on_step: Callable[[StepLog], None]
) -> tuple[Cell, SimResult]:
    """Run ``which`` on the step engine; its results are those of the matrix."""
    inputs = prepare_seed(config, source_runs(config), which.seed)
    return run_cell(config, inputs, which.pressure, which.policy, which.signal, which.seed, on_step)
