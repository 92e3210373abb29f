"""`tick.eval`: the loss on held-out documents, over every valid token once."""

import math
import time

import torch
import torch.distributed as dist
from torch import nn

from .feed import Feed
from .ops import op
from .parallel.fsdp import reshard
from .records import Records
from .state import Progress, Rank, Step
from .step import losses


@op("tick.eval")
def evaluate(
    model: nn.Module,
    feed: Feed,
    rank: Rank,
    records: Records,
    progress: Progress,
    node_id: str,
    dataset: str,
    rows: int | None,
):
    """Sum of losses over all ranks divided by the sum of valid tokens: no average of averages."""
    loader = feed.evaluation(dataset, rows, rank)

    @torch.no_grad()
    def run(step: Step) -> None:
        begin = time.perf_counter()
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=rank.device)
        for batch in loader:
            sums[0] += losses(model, batch, rank.device).cross_entropy
            sums[1] += batch.num_valid
        if rank.world_size > 1:
            dist.all_reduce(sums)
        reshard(model)
        model.train()
        total, tokens = sums.tolist()
        loss = total / tokens if tokens else math.nan
        seconds = time.perf_counter() - begin
        records.event(
            "eval",
            step=progress.step,
            node=node_id,
            dataset=dataset,
            loss=loss,
            tokens=int(tokens),
            batches=len(loader),
            seconds=seconds,
        )
        records.add_to_metric({f"eval/{dataset}/loss": loss})

    return run
