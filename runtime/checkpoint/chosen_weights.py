"""Which weights of a checkpoint are read where weights alone are wanted: the trained or the averaged ones."""

from ..ema import Which
from .layout import Entry


def prefix(which: Which) -> str:
    """What stands before the name of a weight in a full checkpoint; one of weights alone has but `model.`."""
    return "ema." if which == "averaged" else "model."


def published(entry: Entry) -> Which:
    """The weights that a run would publish of a full state."""
    return "averaged" if _averages(entry).get("publish") else "trained"


def evaluated(entry: Entry) -> Which:
    """The weights of a full state that its run looked at."""
    return "averaged" if _averages(entry).get("eval") else "trained"


def _averages(entry: Entry) -> dict:
    """What a full checkpoint says of averages in it, if they hold any weights yet."""
    said = entry.state().get("ema") if entry.is_full else None
    return said if said and said["updates"] else {}
