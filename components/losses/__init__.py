"""`loss NAME { … }`."""

DEFAULT = "cross_entropy"
