"""Fitted signals and the checkpoint format they are exported in."""
