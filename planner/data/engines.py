"""Rules on engines of other programs that sample the completions of rollouts."""

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
