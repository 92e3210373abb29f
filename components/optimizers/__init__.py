"""`optimizer NAME { … }`."""
