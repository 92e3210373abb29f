"""`optimizer NAME { … }`: optimizers."""
