"""How long a run with rollouts samples in a step, where the machines are known: about, and at full length.

Each token of the completions that are sampled at once needs all weights. They are read from a device's memory while
products are computed, of which the slower counts, and with fsdp they are gathered before, which nothing hides. The
stages of a pipeline wait for each other. Prompts, the cache, latencies and collectives of tensor parallel are left out.
"""

from math import prod

from xtrain.dsl.schema.rollout import Rollout
from xtrain.planner.mesh.cluster import resolve_cluster
from xtrain.planner.model.inventory import forward_flops
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import BYTES


def sampling_seconds(run: Resolved, rollout: Rollout) -> float | None:
    """Of all completions that are sampled at once, for a step or several, with `max_tokens` tokens each; None where a
    speed is not known."""
    cluster = resolve_cluster(run.spec, run.formats.compute, run.layout.nodes, run.layout.mesh.ranks_per_node)
    sheet = run.spec.cluster.sheet
    if cluster.flops is None or cluster.link is None or sheet is None or sheet.bandwidth is None:
        return None
    size = BYTES[run.formats.compute]
    ways = {True: run.layout.ep, False: run.size("tp")}
    weights = sum(each.size / ways[each.expert] for each in run.inventory.tensors) * size
    speed = cluster.flops * sum(cluster.efficiency) / len(cluster.efficiency)
    completions = run.batch.micro * rollout.group
    products = completions * forward_flops(run.architecture, run.batch.sequence) / run.size("tp") / speed
    shards = prod(run.size(axis) for axis in run.shard_axes)
    crosses = run.layout.nodes > 1 and cluster.network is not None
    link = cluster.network if crosses and cluster.network is not None else cluster.link
    gathering = weights * (shards - 1) / shards / link if run.dense_fsdp else 0.0
    token = max(weights / sheet.bandwidth, products) + gathering
    return rollout.steps * run.batch.accumulate * rollout.max_tokens * token
