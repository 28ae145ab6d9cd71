"""The vLLM series that the scheduler class was held to, by tests/conformance."""

from __future__ import annotations

from contracts.errors import InvalidInput

SERIES = ("0.15", "0.20", "0.27", "0.33")


def check_version(version: str) -> None:
    """Refuse a vLLM that the conformance tests do not cover; raises InvalidInput."""
    if not any(version == series or version.startswith(f"{series}.") for series in SERIES):
        raise InvalidInput(
            f"vLLM {version} is not one of {', '.join(SERIES)}, which this scheduler was tested "
            "with: install one of those, or run make conformance VLLM_ENV=... against yours, read "
            "what differs, and add its series to integrations/vllm_scheduler.py"
        )
