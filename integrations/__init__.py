"""The same policy and checkpoint inside real engines."""
