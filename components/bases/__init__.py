"""`base NAME { … }`: quantized storage of frozen matrices."""

DEFAULT = "none"
