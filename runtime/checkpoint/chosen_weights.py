"""Which weights of a checkpoint are read where weights alone are wanted: the trained or the averaged ones."""

from xtrain.runtime.checkpoint.layout import CheckpointEntry
from xtrain.runtime.training.ema import Which


def prefix(entry: CheckpointEntry, which: Which) -> str:
    """What stands before the name of such a weight in a checkpoint; one of weights alone has only one kind of them."""
    return "ema." if which == "averaged" and entry.is_full else "model."


def published(entry: CheckpointEntry) -> Which:
    """The weights that a run would publish of a full state, or has published."""
    return "averaged" if _is_of_averages(entry, "publish") else "trained"


def averaged_flaw(entry: CheckpointEntry, *, averaged: bool) -> str:
    """Why a checkpoint has no averaged, or no trained, weights; empty if it has."""
    state = entry.state()
    if not entry.is_full:
        has = state.get("weights") == "averaged"
        return "" if has == averaged else f"holds {'averaged' if has else 'trained'} weights alone"
    said = state.get("ema")
    if not averaged or (said and said["updates"]):
        return ""
    return "has no average yet: it was never updated" if said else "has no averaged weights: its run has no `ema`"


def evaluated(entry: CheckpointEntry) -> Which:
    """The weights of a full state that its run looked at; of weights alone those that they are."""
    return "averaged" if _is_of_averages(entry, "eval") else "trained"


def _is_of_averages(entry: CheckpointEntry, use: str) -> bool:
    """Whether averages are taken for some use: of a full state where they hold any weights yet."""
    state = entry.state()
    if not entry.is_full:
        return state.get("weights") == "averaged"
    said = state.get("ema")
    return bool(said and said["updates"] and said.get(use))
