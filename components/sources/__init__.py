"""`source = NAME(…)` of a dataset."""
