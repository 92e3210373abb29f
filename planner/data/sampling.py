"""Rules on the sampling of rollouts: engines of other programs, what samplers record, and which prompts are drawn."""

from collections.abc import Iterator

from xtrain.dsl.schema.losses import OLD
from xtrain.dsl.schema.policy import Rollout
from xtrain.dsl.spec import Spec

RolloutProblem = tuple[str, str, str, str]
"""(rule, path, message, hint)."""


def problems_of_engine(spec: Spec, rollout: Rollout) -> Iterator[RolloutProblem]:
    """Yield problems of an engine, and of completions that are older than the weights that learn from them."""
    if spec.engine is None:
        if rollout.stale:
            message = "the ranks sample and train in turn, so completions of older weights save no time"
            yield "stale", "rollout.stale", message, "remove it, or add `engine vllm { url = … }`"
        return
    title = spec.engine.title
    if rollout.top_k is not None or rollout.top_p < 1:
        name = "top_p" if rollout.top_k is None else "top_k"
        message = (
            f"{title} gives log-probabilities of the tokens that `{name}` leaves, and the loss computes them over all"
        )
        yield "engine.left_out", f"rollout.{name}", message, "remove it"
    if rollout.replay_routing:
        message = f"{title} does not say to which experts it has sent a token"
        yield "engine.replay", "rollout.replay_routing", message, "remove it, or `engine`"
    if spec.adapter is not None and spec.adapter.kind != "lora":
        message = f"{title} samples with adapters of LoRA, not of {spec.adapter.kind}"
        yield "engine.adapter", "adapter.kind", message, "choose `adapter lora`, or remove `engine`"
    if spec.adapter is None and spec.precision.base.stores:
        message = f"matrices are stored as {spec.precision.base.words()}, which an engine does not take"
        yield "engine.base", "precision.base", message, "train an adapter, or remove `engine`"
    if rollout.stale:
        yield from _stale(spec, rollout)


def _stale(spec: Spec, rollout: Rollout) -> Iterator[RolloutProblem]:
    path, hint = "rollout.stale", "write `stale = 0`"
    for name in (each for each in ("steps", "updates", "attempts") if getattr(rollout, each) > 1):
        message = f"with `{name}` completions are asked for by their own rule, not some steps ahead"
        yield f"stale.{name}", path, message, f"{hint}, or `{name} = 1`"
    if rollout.environment is not None:
        message = "the ranks play the turns of episodes together, before each step"
        yield "stale.environment", path, message, hint
    if OLD not in spec.loss.columns:
        message = f"the loss {spec.loss.kind} does not read `{OLD}`: it cannot know by how much the weights have moved"
        yield "stale.loss", path, message, f"{hint}, or choose a loss such as `cispo`"


def problems_of_logprobs(spec: Spec, rollout: Rollout) -> Iterator[RolloutProblem]:
    """Yield problems of log-probabilities over the tokens that sampling leaves, and of compared distributions."""
    processed, path = rollout.logprobs == "processed", "rollout.logprobs"
    for name in (each for each, on in (("logprobs", processed), ("compare", rollout.compare is not None)) if on):
        if OLD not in spec.loss.columns:
            message = f"the loss {spec.loss.kind} does not read `{OLD}`, the log-probabilities of the sampler"
            yield f"{name}.loss", f"rollout.{name}", message, "remove it, or choose a loss such as `grpo`"
    if rollout.compare is not None and spec.engine is not None:
        message = f"{spec.engine.title} is asked for the log-probabilities of sampled tokens alone"
        yield "compare.engine", "rollout.compare", message, "remove it, or `engine`"
    if processed and rollout.top_k is None and rollout.top_p == 1:
        message = "nothing is left out of the distribution that tokens are sampled from"
        yield "logprobs.all", path, message, "remove it, or add `top_k = 64`"
    elif processed and rollout.top_k is None:
        message = "the step keeps the tokens that `top_p` leaves at each position, which may be the whole vocabulary"
        yield "logprobs.top_p", path, message, "add `top_k = 64`, which bounds them"
    if processed and spec.loss.learns_from is not None:
        message = "the probabilities of a teacher are of all tokens"
        yield "logprobs.teacher", path, message, "write `logprobs = raw`"
    if processed and "mean_logprob_T" in spec.loss.reads(spec.loss.args()):
        message = f"the loss {spec.loss.kind} reads the mean of all log-probabilities, and left-out tokens have none"
        yield "logprobs.mean", path, message, "write `logprobs = raw`, or choose another loss"


def problems_of_replay(spec: Spec, rollout: Rollout) -> Iterator[RolloutProblem]:
    """Yield problems of prompts that are drawn by their success."""
    path, usual = "rollout.replay_prompts", Rollout()
    if not rollout.replay_prompts:
        for name in (each for each in ("difficulty", "solved") if getattr(rollout, each) != getattr(usual, each)):
            yield f"replay.{name}", f"rollout.{name}", "no prompts are drawn by it", "add `replay_prompts = 0.25`"
        return
    if spec.reward is None and rollout.environment is None:
        yield "replay.reward", path, "nothing says whether a completion succeeds", "add `reward exact_answer { }`"
    for name in (each for each in ("steps", "updates", "attempts") if getattr(rollout, each) > 1):
        message = f"with `{name}` prompts are chosen before it is known which ones succeed"
        yield f"replay.{name}", path, message, f"write `{name} = 1`, or remove `replay_prompts`"
    if rollout.stale:
        message = "completions are asked for before it is known which prompts succeed"
        yield "replay.stale", path, message, "write `stale = 0`, or remove `replay_prompts`"
    if spec.phases:
        message = "prompts of earlier phases would be drawn in later ones"
        yield "replay.phases", path, message, "remove `replay_prompts`, or the phases"
