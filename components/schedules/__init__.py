"""`scheduler NAME { … }`."""
