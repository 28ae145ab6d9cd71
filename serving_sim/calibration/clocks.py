"""What a GPU's clocks, temperature and throttle reasons were while it was timed (NVML)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# bits of nvmlClocksThrottleReasons; bit 0 (idle) says nothing about a run
_REASONS = {
    0x002: "application clocks set",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal slowdown (software)",
    0x040: "thermal slowdown (hardware)",
    0x080: "power brake",
    0x100: "display clock",
}


@dataclass(slots=True)
class ClockLog:
    """Extremes over all samples of one GPU; ``nvml`` is the module pynvml, ``handle`` its device.

    A question that the driver does not answer (a virtual GPU) is left out, not guessed.
    """

    nvml: Any
    handle: Any
    sm_mhz: list[int] = field(default_factory=list)
    memory_mhz: list[int] = field(default_factory=list)
    temperature_c: list[int] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    def sample(self) -> None:
        """Read the GPU once."""
        nvml, handle = self.nvml, self.handle
        self._ask(self.sm_mhz, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        self._ask(self.memory_mhz, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM)
        self._ask(
            self.temperature_c, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
        )
        bits: list[int] = []
        self._ask(bits, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        self.reasons |= {name for bit, name in _REASONS.items() if any(b & bit for b in bits)}

    def _ask(self, answers: list[int], question: Any, *arguments: Any) -> None:
        try:
            answers.append(int(question(*arguments)))
        except self.nvml.NVMLError:
            return

    def __str__(self) -> str:
        ranges = [
            f"{label} {min(values)}-{max(values)} {unit}"
            for label, unit, values in (
                ("SM", "MHz", self.sm_mhz),
                ("memory", "MHz", self.memory_mhz),
                ("temperature", "C", self.temperature_c),
            )
            if values
        ]
        throttled = ", ".join(sorted(self.reasons)) or "none seen"
        return "; ".join([*ranges, f"throttling: {throttled}"])


def open_clock_log(uuid: str) -> ClockLog | None:
    """Return the log of the GPU with this ``uuid`` (as torch gives it); None where nvidia-ml-py is
    not installed or NVML does not know the device."""
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return ClockLog(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name))
    except pynvml.NVMLError:
        return None
