"""HTTP side of a training server. It needs no torch; the `Engine` (`engine_interface.py`) does the computing."""
