"""Actions: what `every … NAME` and `on … NAME` do."""
