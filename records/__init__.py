"""What a run writes while it goes on, as typed values: what every key is called, its type, its unit and its meaning."""
