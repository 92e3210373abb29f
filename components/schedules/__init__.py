"""`scheduler NAME { … }`."""

DEFAULT = "constant"
