"""`source = NAME(…)` of a dataset."""

DEFAULT = "python_stdlib"
