"""The command line. Results go to stdout, talk to stderr; only here may the program exit."""

from __future__ import annotations

import signal
import sys
import warnings

import click

from contracts.errors import PreemptBenchError
from preemptbench import __version__
from preemptbench.cli_calibrate import calibrate
from preemptbench.cli_checkpoint import card, export
from preemptbench.cli_collect import collect
from preemptbench.cli_demo import demo
from preemptbench.cli_env import env
from preemptbench.cli_oracle import oracle
from preemptbench.cli_policies import policies
from preemptbench.cli_profiles import profiles
from preemptbench.cli_report import compare, report, rescore
from preemptbench.cli_runs import runs
from preemptbench.cli_simulate import simulate
from preemptbench.cli_study import study
from preemptbench.cli_sweep import sweep
from preemptbench.cli_train import score, train
from preemptbench.cli_validate import validate
from preemptbench.cli_what_if import what_if
from preemptbench.task_options import say_warning

_STOPPED = "terminated: what is finished is kept; the same command goes on"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="preemptbench")
def cli() -> None:
    """What signal does preemption need? Compare victim policies and length signals with LIFO.

    Start with 'preemptbench demo': it runs everything on bundled data in about a minute.
    """


for command in (
    demo, collect, runs, oracle, train, score, card, export, simulate, sweep, study, report,
    rescore, compare, policies, profiles, validate, what_if, calibrate, env,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Run the command line; an expected error is one message and exit status 2. SIGTERM ends as
    Ctrl-C does, with status 143: what is finished stays, and the same command goes on."""
    signal.signal(signal.SIGTERM, _terminate)
    warnings.showwarning = say_warning
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort as abort:
        is_terminated = isinstance(abort.__cause__, _Terminated)
        _leave(_STOPPED if is_terminated else "interrupted", 143 if is_terminated else 130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except PreemptBenchError as error:
        _leave(f"error: {error}", 2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:  # a full disk, a missing right, a folder where a file should be
        _leave(f"error: {error.filename or 'the system'}: {error.strerror or error}", 2)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came; as a KeyboardInterrupt, workers and scratch files are cleared as for Ctrl-C."""


def _terminate(_number: int, _frame: object) -> None:
    raise _Terminated


def _leave(message: str, status: int) -> None:
    click.echo(message, err=True)
    sys.exit(status)
