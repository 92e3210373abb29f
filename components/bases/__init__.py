"""`loss NAME { … }`."""

DEFAULT = "none"
