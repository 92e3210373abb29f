"""What tests of replica groups put into ranks of one process: the rows of those groups alone that took part."""

import json
from pathlib import Path

from rank_mutations import mutation

from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.feed.setup import Feed


@mutation
def rows_of_groups(run: str, replicas: int, data_ranks: int) -> None:
    """A process that takes rows one by one takes those of the groups that took part in a step, as the records of `run`
    say, and of none else. data_ranks: of all groups, each with microbatches of one row."""
    lines = (json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines())
    taking_part = {line["step"]: line["replicas"] for line in lines}
    original, own = Feed.microbatches, data_ranks // replicas

    def microbatches(self: Feed, step: int) -> list[Microbatch]:
        rows = enumerate(original(self, step))
        return [row for place, row in rows if place % data_ranks // own in taking_part[step + 1]]

    Feed.microbatches = microbatches
