"""`pack(NAME)`: assignment of documents to rows."""

DEFAULT = "sequential"
