"""`model FAMILY { … }`."""

DEFAULT = "llama"
