"""`loss NAME { … }`: training losses."""

DEFAULT = "cross_entropy"
