"""The program of a rank, run for one step on tensors without memory: what it holds and what it sends, exactly."""
