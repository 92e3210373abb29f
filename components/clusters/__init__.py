"""`cluster NAME { … }`."""
