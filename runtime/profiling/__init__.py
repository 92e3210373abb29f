"""Looking closely at some steps of a run: traces with their summaries, and what ranks hold in memory."""
