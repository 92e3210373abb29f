"""The nodes of a step that samples what it learns from."""

from typing import Any

from attrs import frozen

from xtrain.dsl.schema.rollout import Reward, Rollout
from xtrain.planner.attention_kernels import NARROWEST, plain_kernels
from xtrain.planner.canonical import portable
from xtrain.planner.graph.builder import Builder
from xtrain.planner.graph.sampling_time import sampling_seconds
from xtrain.planner.mesh.mesh import AXES
from xtrain.planner.model.inventory import forward_flops
from xtrain.planner.model.sampling import (
    completion_positions,
    kept_completions_bytes,
    longest_prompt,
    sampling_cache_bytes,
)
from xtrain.planner.model.scorer import scorer_of
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import bytes_text, flops_text, plural, seconds_text

PROMPTS = "setup.prompts"
SCORER = "setup.scorer"
COMPLETIONS = "setup.completions"


@frozen
class RolloutStep:
    """A node of a step."""

    op: str
    does: str
    args: dict[str, Any]
    axes: tuple[str, ...]


def add_prompts(graph: Builder, run: Resolved, loader: str) -> None:
    """Where a run has rollouts, the node that finds their prompts."""
    rollout = run.spec.rollout
    if rollout is None:
        return
    args = {"positions": completion_positions(run, rollout), "max_tokens": rollout.max_tokens}
    most = f"{longest_prompt(run, rollout):,} tokens"
    does = f"what comes before the last answer of each document is a prompt: of at most {most}"
    graph.add("setup", PROMPTS, does, args=args, after=((loader, "rows"), ("setup.tokenizer", "tokenizer")))
    folder = None if run.spec.reward is None else run.spec.reward.model_folder
    if folder is not None:
        scorer, form = scorer_of(run), run.formats.compute
        kernels = plain_kernels(NARROWEST if scorer is None else scorer.architecture.head_dim)
        args = {"folder": portable(folder), "attention": kernels, "format": form}
        does = f"read the model that scores from {folder}: all of it on the first rank of those with the same rows"
        if scorer is not None:
            args |= {"digest": scorer.digest, "architecture": scorer.architecture.to_json()}
            does += f", {scorer.architecture.title}, {bytes_text(scorer.bytes)} in {form}"
        graph.add("setup", SCORER, does, args=args, after=(loader,))
    if rollout.period > 1:
        again = f", and are learned from {plural(rollout.updates, 'time')}," if rollout.updates > 1 else ","
        does = f"completions of {plural(rollout.steps, 'step')}, which are sampled at once{again} wait here: a "
        does += "checkpoint between these "
        args = {"steps": rollout.steps, **({"updates": rollout.updates} if rollout.updates > 1 else {})}
        does += f"has those of the steps to come, at most {bytes_text(kept_completions_bytes(run, rollout))}, as the "
        does += "weights that have sampled them are gone"
        graph.add("setup", COMPLETIONS, does, args=args, axes=run.wide(*AXES), after=(loader,))


def before_step(run: Resolved, rollout: Rollout, reward: Reward) -> list[RolloutStep]:
    """What is sampled, scored and made into rows before ranks agree on the step."""
    args: dict[str, Any] = {
        "group": rollout.group,
        "max_tokens": rollout.max_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "seed": run.spec.experiment.seed,
        **({"top_k": rollout.top_k} if rollout.top_k is not None else {}),
        **({"replay_routing": True} if rollout.replay_routing else {}),
        **({"show": int(rollout.show.value)} if rollout.show is not None else {}),
        **({"steps": rollout.steps} if rollout.steps > 1 else {}),
        **({"updates": rollout.updates} if rollout.updates > 1 else {}),
    }
    everyone, rows = run.wide(*AXES), run.wide("pp", "ring", "ulysses", "tp")
    prompts = rollout.steps * run.batch.rows // run.layout.mesh.data_ranks
    forward, world = forward_flops(run.architecture, run.batch.sequence), run.layout.mesh.world_size
    tokens = rollout.steps * run.batch.rows * rollout.group * rollout.max_tokens
    share = forward * tokens / world
    cache = bytes_text(sampling_cache_bytes(run, rollout))
    several = f"for {rollout.steps} steps at once " if rollout.steps > 1 else ""
    several = f"every {rollout.period} steps {several}" if rollout.updates > 1 else several
    does = f"{several}each data rank samples {plural(rollout.group, 'completion')} of each of "
    does += f"{plural(prompts, 'prompt')}, "
    does += f"{plural(rollout.max_tokens, 'token')} at most, one behind the other; {drawn_text(rollout)}; "
    does += "experts of each token are recorded for the step; " if rollout.replay_routing else ""
    does += f"key-value cache: {cache} a rank; at most {flops_text(share)} a rank"
    if (seconds := sampling_seconds(run, rollout)) is not None:
        does += f", about {seconds_text(seconds)} at full length"
    by = ", divided by its standard deviation" if rollout.scale_rewards == "group" else ""
    made = f"advantages are rewards less the mean of their group{by}; the completions of a prompt are a row"
    masks = {"mask_truncated": True} if rollout.mask_truncated else {}
    made += "; those that are cut are not learned from" if masks else ""
    scored, scorer = reward.does(), scorer_of(run)
    if scorer is not None:
        scored += f"; a forward of at most {flops_text(scorer.flops / run.layout.mesh.data_ranks)} a rank that scores"
    nodes = [
        RolloutStep("rollout.generate", does, args, everyone),
        RolloutStep("rollout.score", scored, {"kind": reward.kind, **reward.args()}, rows),
        RolloutStep("rollout.advantages", made, {"scale": rollout.scale_rewards, **masks}, everyone),
    ]
    if run.spec.loss.computed:
        share = flops_text(forward * run.batch.tokens_per_step / world)
        does = f"log-probabilities of the tokens of completions by the reference: a forward, {share} a rank"
        nodes.append(RolloutStep("rollout.reference", does, {}, everyone))
    return nodes


def behind_forward(run: Resolved) -> RolloutStep:
    """What is measured of the sampler once the step has computed the same tokens."""
    does = "log-probabilities of the sampler are compared with those of the step"
    replays = {"replay_routing": True} if run.spec.rollout is not None and run.spec.rollout.replay_routing else {}
    does += ", and the experts that it would have chosen with those that were replayed" if replays else ""
    return RolloutStep("rollout.compare", does, replays, run.wide(*AXES))


def drawn_text(rollout: Rollout) -> str:
    """How tokens are drawn, in words."""
    parts = [f"temperature {rollout.temperature:g}"]
    parts += [f"top_k {rollout.top_k}"] if rollout.top_k is not None else []
    parts += [f"top_p {rollout.top_p:g}"] if rollout.top_p < 1 else []
    return ", ".join(parts)
