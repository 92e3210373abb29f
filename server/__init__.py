"""A training server: the HTTP side of it. It needs no torch; what computes is behind the `Engine` of `engine.py`."""
