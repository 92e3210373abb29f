"""One rank of a job of the tests: counts what it computes, and may have a fault."""

import os
from pathlib import Path
from typing import Any

from rank_counts import note

from xtrain.plan.plan import Plan
from xtrain.runtime.inspect import held_state
from xtrain.runtime.inspect.held_state import save

__all__ = ["run", "save"]


def run(job: dict[str, Any], plan: Plan, rank: int) -> int:
    """Execute the plan, in the job's directory; the exit code is 0 if it ended as it should."""
    if not job["saves"]:
        from rank_mutations import skip

        skip("tick.checkpoint")
        skip("tick.model")
    if job["mutation"]:
        from rank_mutations import MUTATIONS

        os.environ["XTRAIN_TEST_CONTROL"] = str(Path(job["directory"]) / "control")
        MUTATIONS[job["mutation"]](**job["mutation_arguments"])
    note(Path(job["directory"]), rank)
    return held_state.run(job, plan, rank)
