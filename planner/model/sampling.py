"""What a rank samples at once in a run with rollouts, and the memory that this takes."""

from typing import TYPE_CHECKING

from ...dsl.schema.rollout import Rollout
from ..units import BYTES
from .cache import cache_bytes

if TYPE_CHECKING:
    from ..resolved import Resolved

# Copies of the logits of all completions: as they are, exact, as probabilities, and sorted or summed up.
LOGITS = 4


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


def sampling_bytes(run: "Resolved") -> int:
    """What sampling allocates beside weights, gradients and states: the cache, logits, and what is drawn of them."""
    rollout = run.spec.rollout
    if rollout is None:
        return 0
    exact = max(BYTES["fp32"], BYTES[run.formats.compute])
    logits = run.batch.micro * rollout.group * run.architecture.vocab * exact
    return sampling_cache_bytes(run, rollout) + LOGITS * logits
