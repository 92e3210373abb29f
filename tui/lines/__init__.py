"""A run as lines: on a terminal, for a log file, for programs."""
