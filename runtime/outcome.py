"""How a run can end, and the exit code that says so."""

EXIT_CODES = {"done": 0, "complete": 0, "failed": 1, "environment": 3, "stopped": 75, "interrupted": 130}
