"""`parallel { stack = NAME }`."""

DEFAULT = "parallel"
