"""``preemptbench policies``: the built-in victim rules, and what each reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from preemptbench.options import json_option

if TYPE_CHECKING:
    from contracts.policy import Policy


@click.command(short_help="List the built-in victim rules.")
@json_option
def policies(as_json: bool) -> None:
    """List the built-in victim rules and say which read a signal, and which the deadlines."""
    from serving_sim.policies import get_policy, list_policies

    # a family is listed as name(depth): any depth shows what it reads
    rows = [(name, get_policy(name.replace("(depth)", "(0.5)"))) for name in list_policies()]
    if as_json:
        click.echo(json.dumps({name: _reads(policy) for name, policy in rows}))
        return
    for name, policy in rows:
        read = [_READS[field] for field, reads in _reads(policy).items() if reads]
        click.echo(f"{name:<24} {'reads ' if read else ''}{' and '.join(read)}".rstrip())


_READS = {"reads_signal": "a signal", "reads_deadline": "the deadline"}


def _reads(policy: Policy) -> dict[str, bool]:
    return {field: getattr(policy, field) for field in _READS}
