"""`reward NAME { … }`."""
