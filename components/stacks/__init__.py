"""`parallel { stack = NAME }`: parallelism implementations."""

DEFAULT = "parallel"
