"""`model FAMILY { … }`."""
