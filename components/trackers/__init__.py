"""Trackers: `log { NAME … }`, which take the records of a run in addition to its own files."""
