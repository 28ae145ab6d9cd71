"""The vLLM series and SGLang versions that tests/conformance held the integrations to."""

from __future__ import annotations

from contracts.errors import InvalidInput

SERIES = ("0.15", "0.20", "0.27", "0.33")
SGLANG = ("0.5.23",)
_POLICY_READ_WHEN_SHORT_ONLY = ("0.33",)  # vllm/v1/core/sched/scheduler.py, schedule()


def check_version(version: str) -> None:
    """Refuse a vLLM that the conformance tests do not cover; raises InvalidInput."""
    if not _is_of(version, SERIES):
        raise InvalidInput(
            f"vLLM {version} is not one of {', '.join(SERIES)}, which this scheduler was tested "
            "with: install one of those, or run make conformance VLLM_ENV=... against yours, read "
            "what differs, and add its series to integrations/versions.py"
        )


def check_sglang_version(version: str) -> None:
    """Refuse an SGLang that the conformance tests do not cover; raises InvalidInput."""
    if version not in SGLANG:
        raise InvalidInput(
            f"SGLang {version} is not {', '.join(SGLANG)}, which this plug-in was tested with: run "
            "tests/conformance/test_sglang_plugin.py against yours and add it to "
            "integrations/versions.py, or unset PREEMPTBENCH_POLICY"
        )


def policy_reads_tell(version: str) -> bool:
    """Say whether ``schedule()`` of this vLLM reads its queue policy only when blocks ran out."""
    return _is_of(version, _POLICY_READ_WHEN_SHORT_ONLY)


def _is_of(version: str, series: tuple[str, ...]) -> bool:
    return any(version == one or version.startswith(f"{one}.") for one in series)
