"""What a rank samples at once in a run with rollouts, and the memory that this takes."""

from typing import TYPE_CHECKING

from xtrain.dsl.schema.rollout import Rollout
from xtrain.planner.model.cache import cache_bytes
from xtrain.planner.units import BYTES

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved

# Copies of the logits of all completions: as they are, exact, as probabilities, and sorted or summed up.
LOGITS = 4
# Of a token that a checkpoint keeps, with its log-probability.
TOKEN_BYTES = 16


def completion_positions(run: "Resolved", rollout: Rollout) -> int:
    """Positions of a row that a completion has together with its prompt."""
    return run.batch.sequence // rollout.group // run.align * run.align


def longest_prompt(run: "Resolved", rollout: Rollout) -> int:
    """Tokens of a prompt at most, as the last token of a completion takes no position; below 1 in rows that are too
    short."""
    return completion_positions(run, rollout) + 1 - rollout.max_tokens


def sampling_cache_bytes(run: "Resolved", rollout: Rollout) -> int:
    """Of keys and values of the completions of a microbatch, on the rank with the most."""
    return cache_bytes(run, run.batch.micro * rollout.group, completion_positions(run, rollout))


def kept_completions_bytes(run: "Resolved", rollout: Rollout) -> int:
    """Of what a checkpoint behind the first of several steps, whose completions are sampled at once, holds of them, all
    of full length; without texts. If those of the first step come again, they are among them."""
    waiting = (rollout.steps - (rollout.updates == 1)) * run.batch.rows * rollout.group
    experts = completion_positions(run, rollout) * replayed_width(run) * BYTES["fp32"]
    return waiting * (rollout.max_tokens * TOKEN_BYTES + experts)


def replayed_width(run: "Resolved") -> int:
    """Numbers of a token that say which experts it was sent to when it was sampled; 0 where that is not replayed."""
    arch, rollout = run.architecture, run.spec.rollout
    return len(arch.expert_layers) * arch.experts_per_token if rollout is not None and rollout.replay_routing else 0


def replayed_bytes(run: "Resolved") -> int:
    """Of these numbers for the microbatches that are on a device at once."""
    microbatches = run.batch.accumulate if run.size("pp") > 1 else 1
    return microbatches * run.positions * replayed_width(run) * BYTES["fp32"]


def sampling_bytes(run: "Resolved") -> int:
    """What sampling allocates beside weights, gradients and states: the cache, logits, and what is drawn of them."""
    rollout = run.spec.rollout
    if rollout is None:
        return 0
    exact = max(BYTES["fp32"], BYTES[run.formats.compute])
    logits = run.batch.micro * rollout.group * run.architecture.vocab * exact
    return sampling_cache_bytes(run, rollout) + LOGITS * logits
