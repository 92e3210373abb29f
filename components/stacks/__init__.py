"""`parallel { stack = NAME }`."""
