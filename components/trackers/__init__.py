"""Trackers of `log { NAME … }`, which receive the records of a run in addition to its own files."""
