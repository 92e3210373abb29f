"""`tokenizer …`."""

DEFAULT = "folder"
