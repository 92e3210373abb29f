"""`engine NAME { … }`."""
