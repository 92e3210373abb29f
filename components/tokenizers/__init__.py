"""`tokenizer …`."""
