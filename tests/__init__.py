"""Laws, differential, golden, unit and fuzz tests."""
