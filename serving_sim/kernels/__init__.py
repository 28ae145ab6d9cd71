"""Compiled inner loops. Only serving_sim calls them; no code is compiled before the first call."""
