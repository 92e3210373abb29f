"""`loss NAME { … }`."""
