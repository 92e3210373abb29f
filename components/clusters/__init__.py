"""`cluster NAME { … }`."""

DEFAULT = "none"
