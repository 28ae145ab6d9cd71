"""The front door: the version and the command line; nothing imports it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("preemptbench")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"
