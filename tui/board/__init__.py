"""The dashboard: a full-screen view of one run, drawn from its files; it never touches training."""
