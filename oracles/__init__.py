"""Temperature-zero collection, run logs to oracles, and the clairvoyant bound."""
