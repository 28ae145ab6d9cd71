"""Run logs and workloads: reading, writing, checking, splitting, and small bundled data."""
