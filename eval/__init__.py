"""Signal quality, the matrix of policies and signals, breach, statistics, report."""
