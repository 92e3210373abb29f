"""What a run tells of itself: numbers of its steps, events, and who takes them."""
