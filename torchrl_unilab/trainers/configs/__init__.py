"""Settings of runs: one line each, with type, default, help text and constraint."""
