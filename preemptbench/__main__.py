"""``python -m preemptbench``."""

from preemptbench.cli import main

main()
