"""Actions: the work of `every … NAME` and `on … NAME`."""
