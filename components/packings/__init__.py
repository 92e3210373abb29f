"""`pack(NAME)`: which documents share a row."""

DEFAULT = "sequential"
