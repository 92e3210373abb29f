"""Actions: the work of `every … NAME` and `on … NAME`."""

# Found here, so that actions that a spec does not name are not loaded.
TICKED = ("log", "checkpoint")
"""Actions with `default_ticks`."""
COMMANDED = ("checkpoint", "eval", "profile")
"""Actions with `commands`, in the order in which a plan lists these."""
SAVES = "checkpoint"
"""Action with which a run saves its state by default."""
STOPS = "stop"
"""Action that ends a run."""
