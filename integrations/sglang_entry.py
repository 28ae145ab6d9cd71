"""Where SGLang finds the plug-in: entry point ``preemptbench`` of the group ``sglang.srt.plugins``.

SGLang loads every plug-in that is installed, in each of its processes: this one imports nothing
unless PREEMPTBENCH_POLICY asks for it.
"""

from __future__ import annotations

import os


def register() -> None:
    """Hook the retraction order, if PREEMPTBENCH_POLICY is set."""
    if os.environ.get("PREEMPTBENCH_POLICY"):
        from integrations.sglang_plugin import hook

        hook()
