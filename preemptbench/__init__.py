"""The front door: the version and the command line; nothing imports it."""
