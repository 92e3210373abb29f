"""Nodes of rollouts: prompts, environments, completions and their rewards.

Sampling time: each token of completions that are sampled at once needs all weights. Reading them from memory overlaps
with products, and the slower of both counts; gathering them with fsdp does not overlap. The stages of a pipeline wait
for each other. Prompts, the cache, latencies and collectives of tensor parallelism are not counted.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from xtrain.dsl.schema.policy import KEPT, REWARDS, SEEN, Environment, Reward, Rollout, SamplingEngine
from xtrain.lazy_attrs import frozen
from xtrain.plan.canonical import portable
from xtrain.plan.data import call_text
from xtrain.plan.graph import Builder, Rules, component_rules, learns, resumes, rounds
from xtrain.plan.hardware import NARROWEST, plain_kernels
from xtrain.plan.mesh import AXES
from xtrain.plan.parameters import forward_flops
from xtrain.plan.resolved import Resolved
from xtrain.planner.derive.further_models import (
    cache_text,
    completion_positions,
    computes_again,
    kept_completions_bytes,
    longest_prompt,
    sampler_widths,
    sampling_cache_bytes,
    scorer_of,
)
from xtrain.planner.derive.layout import resolve_cluster
from xtrain.text.units import BYTES, bytes_text, flops_text, plural, seconds_text

ENVIRONMENT: Final = "setup.environment"
ENGINE: Final = "setup.engine"
WEIGHTS_FOLDER: Final = "rollout_weights"
_CALLS: Final = "calls of an episode are limited by it from here on"


@resumes(
    ENVIRONMENT,
    "name tools",
    user=learns("environment", "episodes come from other code or settings from here on"),
    seconds=learns("environment", _CALLS),
    wait=learns("environment", _CALLS),
    memory=learns("environment", _CALLS),
)
def add_environments(graph: Builder, resolved: Resolved, loader: str) -> None:
    """Add the node of each environment of a spec."""
    spec = resolved.spec
    if spec.rollout is None:
        return
    for environment in spec.environments.values():
        args = {"name": environment.name, "user": environment.call(), **limits(environment)}
        args |= {"tools": list(environment.tools)} if environment.tools else {}
        id = f"{ENVIRONMENT}.{environment.name}"
        graph.add("setup", ENVIRONMENT, _does(environment), id=id, args=args, after=(loader,))


def limits(environment: Environment) -> dict[str, Any]:
    """Return the limits of a call as JSON: seconds of processor time and of waiting, and bytes."""
    numbers = {name: getattr(environment, name).value for name in ("seconds", "wait", "memory")}
    return {name: int(number) if number == int(number) else number for name, number in numbers.items()}


def _does(environment: Environment) -> str:
    tools = ", ".join(tool_text(tool) for tool in environment.tools)
    does = f"have conversations with {call_text(environment.call())}"
    does += f"; the model may call {tools}" if tools else "; without tools"
    does += "; each episode has a process of its own, in which a call may take "
    does += (
        f"{seconds_text(environment.seconds.value)} of processor time, {seconds_text(environment.wait.value)} in all, "
    )
    return f"{does}and {bytes_text(int(environment.memory.value))} of memory; a call that takes more ends its episode"


def tool_text(tool: dict[str, Any]) -> str:
    """Return a tool as text: `add(a: integer, b: integer)`."""
    schema = tool["function"]["parameters"]
    parameters = (
        f"{name}: {form.get('type', 'any')}{'' if name in schema['required'] else ' = …'}"
        for name, form in schema["properties"].items()
    )
    return f"{tool['function']['name']}({', '.join(parameters)})"


def episodes_text(resolved: Resolved, rollout: Rollout) -> str:
    """Return what the episodes of a step are, and how many tokens they sample and read at most."""
    most = resolved.batch.rows * rollout.steps * rollout.group
    turns, room = plural(rollout.turns, "turn"), completion_positions(resolved, rollout) + 1
    sampled = most * rollout.turns * rollout.max_tokens
    text = f"episodes with the environment {rollout.environment} of at most {turns}, each at most "
    text += f"{plural(rollout.max_tokens, 'token')}, {room:,} tokens with what the environment says; a turn reads the "
    text += f"episode before it again: at most {sampled:,} tokens are sampled and {most * rollout.turns * room:,} read"
    return text


def sampling_seconds(resolved: Resolved, rollout: Rollout) -> float | None:
    """Return the seconds to sample all completions of one round, for one step or several, with `max_tokens` tokens
    each; of episodes also those to read each before its turns. None if a speed is unknown."""
    cluster = resolve_cluster(
        resolved.spec, resolved.formats.compute, resolved.layout.nodes, resolved.layout.mesh.ranks_per_node
    )
    sheet = resolved.spec.cluster.sheet
    if cluster.flops is None or cluster.link is None or sheet is None or sheet.bandwidth is None:
        return None
    size = BYTES[resolved.formats.compute]
    ways = {True: resolved.layout.ep, False: resolved.size("tp")}
    weights = sum(each.size / ways[each.expert] for each in resolved.inventory.tensors) * size
    speed = cluster.flops * sum(cluster.efficiency) / len(cluster.efficiency)
    completions, positions = resolved.batch.micro * rollout.group, completion_positions(resolved, rollout)
    position = completions * forward_flops(resolved.architecture, resolved.batch.sequence) / resolved.size("tp") / speed
    products = position * (positions if computes_again(resolved) else 1)
    shards = prod(resolved.size(axis) for axis in resolved.shard_axes)
    crosses = resolved.layout.nodes > 1 and cluster.network is not None
    link = cluster.network if crosses and cluster.network is not None else cluster.link
    gathering = weights * (shards - 1) / shards / link if resolved.dense_fsdp else 0.0
    token = max(weights / sheet.bandwidth, products) + gathering
    microbatches = rollout.steps * resolved.batch.accumulate
    if rollout.environment is None:
        return microbatches * rollout.max_tokens * token
    return microbatches * rollout.turns * (rollout.max_tokens * token + position * positions)


PROMPTS = "setup.prompts"
SCORER = "setup.scorer"
COMPLETIONS = "setup.completions"
PROMPT_RATES = "setup.prompt_rates"


DIFFICULTIES: Final = {"unsolved": "1 − s", "learnable": "s (1 − s)"}


@frozen
class RolloutStep:
    """Node of a step."""

    op: str
    does: str
    args: dict[str, Any]
    axes: tuple[str, ...]


@resumes(
    ENGINE,
    "rank_of_adapter",
    harmless="engine.kind engine.url engine.key engine.patience",
    switch=True,
)
def add_engine(graph: Builder, resolved: Resolved, prompts: str) -> None:
    """Add the node of the engine of another program that samples."""
    engine = resolved.spec.engine
    if engine is None:
        return
    adapter = resolved.architecture.adapter
    args: dict[str, Any] = {"kind": engine.kind, "url": engine.url, "patience": engine.patience.value}
    args |= {"key": engine.key} if engine.key is not None else {}
    args["rank_of_adapter"] = 0 if adapter is None else adapter.largest
    does = f"{engine.title} at {engine.url} samples the completions; a request is repeated for "
    does += (
        f"{seconds_text(engine.patience.value)} while it is away, and weights that it has lost are given to it again"
    )
    graph.add("setup", ENGINE, does, args=args, axes=resolved.wide(*AXES), after=((prompts, "prompts"),))


def weights_node(resolved: Resolved, rollout: Rollout, engine: SamplingEngine) -> "RolloutStep":
    """Return the node that gives an engine the weights."""
    whole = resolved.architecture.adapter is None
    format = resolved.formats.compute if whole and engine.reads_files else resolved.formats.params
    tensors = [each for each in resolved.inventory.tensors if whole or each.trained]
    size = sum(each.size for each in tensors) * BYTES[format]
    what = "weights" if whole else "adapter"
    does = f"write the {what} to {WEIGHTS_FOLDER} of the run, {bytes_text(size)} in {format}, "
    does += f"for {engine.title} to read there" if engine.reads_files else f"and send them to {engine.title}"
    does += "; the next step waits for it"
    if rollout.period > 1:
        does += f"; every {rollout.period} steps"
    if rollout.stale and whole and not engine.keeps_models:
        does += "; before that, completions by the weights before are awaited"
    args = {"dtype": format, **({"stale": rollout.stale} if rollout.stale else {})}
    args |= {"period": rollout.period} if rollout.period > 1 else {}
    return RolloutStep("rollout.weights", does, args, resolved.wide(*AXES))


@resumes(
    PROMPT_RATES,
    "seed",
    switch=True,
    share=learns("rollout.replay_prompts", "prompts are drawn by it from here on"),
    difficulty=learns("rollout.difficulty", "prompts are drawn by it from here on"),
)
@resumes("setup.prompts", "positions max_tokens")
@resumes("setup.completions", "steps updates stale")
@resumes(
    "setup.scorer",
    "architecture attention format",
    folder=learns("reward.folder", "completions are scored by it from here on"),
    digest=learns("reward.folder", "completions are scored by other weights from here on"),
)
def add_prompts(graph: Builder, resolved: Resolved, loader: str) -> None:
    """Add the node that finds prompts, if the run has rollouts."""
    rollout = resolved.spec.rollout
    if rollout is None:
        return
    add_environments(graph, resolved, loader)
    args = {"positions": completion_positions(resolved, rollout), "max_tokens": rollout.max_tokens}
    most = f"{longest_prompt(resolved, rollout):,} tokens"
    does = f"take prompts from documents: the text before the last answer, at most {most}"
    sources = ((loader, "rows"), ("setup.tokenizer", "tokenizer"))
    if rollout.replay_prompts:
        share, weight = int(rollout.replay_prompts * resolved.batch.rows), DIFFICULTIES[rollout.difficulty]
        drawn = f"draw {plural(share, 'prompt')} of each step from earlier ones, by {weight}, s the share of their "
        drawn += "newest completions that succeeded; a checkpoint includes s of each prompt"
        rates = {
            "share": rollout.replay_prompts,
            "difficulty": rollout.difficulty,
            "seed": resolved.spec.experiment.seed,
        }
        graph.add("setup", PROMPT_RATES, drawn, args=rates, after=(loader,))
        sources = (*sources, (PROMPT_RATES, "success rates"))
    graph.add("setup", PROMPTS, does, args=args, after=sources)
    add_engine(graph, resolved, PROMPTS)
    folder = None if resolved.spec.reward is None else resolved.spec.reward.model_folder
    if folder is not None:
        scorer, form = scorer_of(resolved), resolved.formats.compute
        kernels = plain_kernels(NARROWEST if scorer is None else scorer.architecture.head_dim)
        args = {"folder": portable(folder), "attention": kernels, "format": form}
        does = f"load the reward model {folder}, complete on the first of the ranks with the same rows"
        if scorer is not None:
            args |= {"digest": scorer.digest, "architecture": scorer.architecture.to_json()}
            does += f", {scorer.architecture.title}, {bytes_text(scorer.bytes)} in {form}"
        graph.add("setup", SCORER, does, args=args, after=(loader,))
    if rollout.stale:
        kept = bytes_text(kept_completions_bytes(resolved, rollout))
        does = (
            f"keep the completions that were asked for {plural(rollout.stale, 'step')} ahead; a checkpoint waits for "
        )
        does += f"completions of the steps to come and includes them, at most {kept}"
        args = {"steps": 1, "stale": rollout.stale}
        graph.add("setup", COMPLETIONS, does, args=args, axes=resolved.wide(*AXES), after=(loader,))
    elif rollout.period > 1:
        again = f" and used {plural(rollout.updates, 'time')}" if rollout.updates > 1 else ""
        kept = bytes_text(kept_completions_bytes(resolved, rollout))
        does = f"keep the completions of {plural(rollout.steps, 'step')}, sampled at once{again}; a checkpoint between "
        does += f"these steps includes the completions of the remaining ones, at most {kept}, because the weights that "
        does += "sampled them are gone"
        args = {"steps": rollout.steps, **({"updates": rollout.updates} if rollout.updates > 1 else {})}
        graph.add("setup", COMPLETIONS, does, args=args, axes=resolved.wide(*AXES), after=(loader,))


_SAMPLED: Final = "completions are sampled by it from here on"


_MASKED: Final = learns("rollout.mask_truncated", "the loss of completions uses it from here on")


def _reward_rules(args: Mapping[str, Any]) -> Rules:
    return component_rules(REWARDS, args, "completions are scored by it from here on")


@resumes(
    "rollout.generate",
    "seed",
    switch=True,
    harmless="rollout.show rollout.compare",
    replay_routing=learns("rollout.replay_routing", "tokens go to their experts by it from here on"),
    steps=learns("rollout.steps", "completions are sampled for this many steps at once from here on"),
    updates=learns("rollout.updates", "this many steps learn from each completion from here on"),
    group=learns("rollout.group", _SAMPLED),
    max_tokens=learns("rollout.max_tokens", _SAMPLED),
    temperature=learns("rollout.temperature", _SAMPLED),
    top_k=learns("rollout.top_k", _SAMPLED),
    top_p=learns("rollout.top_p", _SAMPLED),
    environment=learns("rollout.environment", _SAMPLED),
    turns=learns("rollout.turns", _SAMPLED),
    logprobs=learns("rollout.logprobs", "log-probabilities are of other tokens from here on"),
    stale=learns("rollout.stale", "completions are asked for this many steps ahead from here on"),
)
@resumes(
    "rollout.weights",
    harmless="stale=rollout.stale period=rollout.steps",
    switch=True,
    dtype=rounds("engine.kind", "an engine is given the weights in another number format"),
)
@resumes("rollout.score", by=_reward_rules)
@resumes(
    "rollout.advantages",
    scale=learns("rollout.scale_rewards", "advantages are computed by it from here on"),
    mask_truncated=_MASKED,
    overlong=learns("rollout.overlong", "lengths are punished by it from here on"),
)
@resumes(
    "rollout.replace",
    switch=True,
    attempts=learns("rollout.attempts", "groups without a signal are replaced by it from here on"),
)
@resumes("rollout.remember", switch=True, solved=learns("rollout.solved", "completions succeed by it from here on"))
@resumes("rollout.reference")
@resumes("rollout.rows", mask_truncated=_MASKED)
def before_step(resolved: Resolved, rollout: Rollout, reward: Reward | None) -> list[RolloutStep]:
    """Return the nodes that sample, score and form rows before ranks agree on the step."""
    args: dict[str, Any] = {
        "group": rollout.group,
        "max_tokens": rollout.max_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "seed": resolved.spec.experiment.seed,
        **({"top_k": rollout.top_k} if rollout.top_k is not None else {}),
        **({"replay_routing": True} if rollout.replay_routing else {}),
        **({"logprobs": rollout.logprobs} if rollout.logprobs != "raw" else {}),
        **({"compare": rollout.compare} if rollout.compare is not None else {}),
        **({"show": int(rollout.show.value)} if rollout.show is not None else {}),
        **({"steps": rollout.steps} if rollout.steps > 1 else {}),
        **({"updates": rollout.updates} if rollout.updates > 1 else {}),
        **({"stale": rollout.stale} if rollout.stale else {}),
        **({"environment": rollout.environment, "turns": rollout.turns} if rollout.environment is not None else {}),
    }
    everyone, rows = resolved.wide(*AXES), resolved.wide("pp", "ring", "ulysses", "tp")
    prompts = rollout.steps * resolved.batch.rows // resolved.layout.mesh.data_ranks
    forward, world = forward_flops(resolved.architecture, resolved.batch.sequence), resolved.layout.mesh.world_size
    turns = 1 if rollout.environment is None else rollout.turns
    tokens = rollout.steps * resolved.batch.rows * rollout.group * rollout.max_tokens * turns
    if turns > 1:  # each turn reads the episode before it
        tokens += rollout.steps * resolved.batch.rows * rollout.group * completion_positions(resolved, rollout) * turns
    share = forward * tokens / world
    share *= completion_positions(resolved, rollout) if computes_again(resolved) else 1
    cache = cache_text(resolved, sampling_cache_bytes(resolved, rollout))
    several = f", for {rollout.steps} steps at once" if rollout.steps > 1 else ""
    several += f", every {rollout.period} steps" if rollout.updates > 1 else ""
    does = f"sample {plural(rollout.group, 'completion')} of each of {plural(prompts, 'prompt')} on each data rank"
    if rollout.environment is None:
        does += f"{several}, at most {plural(rollout.max_tokens, 'token')} each, one microbatch after another; "
    else:
        does += f"{several}: {episodes_text(resolved, rollout)}; "
    does += f"{drawn_text(rollout)}; "
    does += "record the experts of each token for the step; " if rollout.replay_routing else ""
    does += _recorded_text(resolved, rollout)
    engine = resolved.spec.engine
    if engine is not None:
        does = f"ask {engine.title} for these completions: {does}{asked_text(rollout)}"
    else:
        does += f"{cache}; at most {flops_text(share)} a rank"
    if engine is None and (seconds := sampling_seconds(resolved, rollout)) is not None:
        does += f", about {seconds_text(seconds)} at full length"
    made = "the completions of a prompt form a row"
    masks = {"mask_truncated": True} if rollout.mask_truncated else {}
    made += "; truncated completions are not trained on" if masks else ""
    nodes = [weights_node(resolved, rollout, engine)] if engine is not None else []
    nodes.append(RolloutStep("rollout.generate", does, args, everyone))
    by = ", divided by its standard deviation" if rollout.scale_rewards == "group" else ""
    advantages = {"scale": rollout.scale_rewards, **masks}
    if rollout.overlong is not None:
        by += f"; −1 to 0 is added to the reward for the last {plural(rollout.overlong, 'token')} before max_tokens"
        advantages |= {"overlong": rollout.overlong}
    replaces = f"replace groups whose rewards are all equal by groups of other prompts, at most {rollout.attempts - 1} "
    replaces += f"times: a step samples up to {rollout.attempts} times as much"
    replacing = RolloutStep("rollout.replace", replaces, {"attempts": rollout.attempts}, everyone)
    replacing_nodes = [replacing] if rollout.attempts > 1 else []
    if rollout.replay_prompts:
        remembers = f"remember the share of completions of each prompt with a reward of at least {rollout.solved:g}"
        replacing_nodes.append(RolloutStep("rollout.remember", remembers, {"solved": rollout.solved}, everyone))
    if rollout.environment is not None:
        made = (
            f"advantages: reward of an episode minus the mean of its group{by}; {made}; turns are trained on, what the "
        )
        made += "environment says is not"
        nodes += [*replacing_nodes, RolloutStep("rollout.advantages", made, advantages, everyone)]
    elif reward is None:
        nodes.append(RolloutStep("rollout.rows", made, masks, everyone))
    else:
        made = f"advantages: reward minus the mean of its group{by}; {made}"
        scored, scorer = reward.does(), scorer_of(resolved)
        if scorer is not None:
            share = flops_text(scorer.flops / resolved.layout.mesh.data_ranks)
            scored += f"; a reward-model forward of at most {share} a rank"
        nodes += [
            RolloutStep("rollout.score", scored, {"kind": reward.kind, **reward.args()}, rows),
            *replacing_nodes,
            RolloutStep("rollout.advantages", made, advantages, everyone),
        ]
    if resolved.spec.loss.computed:
        share = flops_text(forward * resolved.batch.tokens_per_step / world)
        does = f"log-probabilities of completions under the reference: a forward, {share} a rank"
        nodes.append(RolloutStep("rollout.reference", does, {}, everyone))
    return nodes


def _recorded_text(resolved: Resolved, rollout: Rollout) -> str:
    """Return what is recorded of the distribution that a token is sampled from."""
    widths = sampler_widths(resolved)
    text = ""
    if KEPT in widths:
        text = "log-probabilities of sampler and step are of the tokens that top_k and top_p leave, "
        text += f"at most {widths[KEPT]:,}; "
    if rollout.compare is not None:
        text += f"record the {widths[SEEN]:,} most probable tokens where each is sampled; "
    size = sum(widths.values()) * BYTES["fp32"]
    return f"{text}{bytes_text(size)} more for each token; " if size else ""


@resumes("rollout.compare", "replay_routing distributions")
def behind_forward(resolved: Resolved) -> RolloutStep:
    """Return the node that measures the sampler after the step has computed the same tokens."""
    does = "compare the log-probabilities of sampler and step"
    replays = (
        {"replay_routing": True} if resolved.spec.rollout is not None and resolved.spec.rollout.replay_routing else {}
    )
    does += ", and the experts that the step would choose with the replayed ones" if replays else ""
    if resolved.spec.rollout is not None and (number := resolved.spec.rollout.compare) is not None:
        does += f"; and the whole distributions: the {number:,} most probable tokens of the sampler, all others as one"
        replays = {**replays, "distributions": True}
    return RolloutStep("rollout.compare", does, replays, resolved.wide(*AXES))


def asked_text(rollout: Rollout) -> str:
    """Return when completions of an engine are learned from."""
    if not rollout.stale:
        return "the step waits for them"
    ahead = plural(rollout.stale, "step")
    return f"they are asked for {ahead} ahead, while steps train, and learned from by weights {ahead} newer"


def drawn_text(rollout: Rollout) -> str:
    """Return the sampling settings as text."""
    parts = [f"temperature {rollout.temperature:g}"]
    parts += [f"top_k {rollout.top_k}"] if rollout.top_k is not None else []
    parts += [f"top_p {rollout.top_p:g}"] if rollout.top_p < 1 else []
    return ", ".join(parts)
