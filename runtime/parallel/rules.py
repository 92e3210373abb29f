"""Finding the modules that a rule of the plan speaks of, and holding their number against the plan."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Protocol

from torch import nn

from xtrain.runtime.ops import PlanMismatch
from xtrain.runtime.state import Rank


class Named(Protocol):
    def named_modules(self) -> Iterable[tuple[str, nn.Module]]: ...


def matching(model: Named, pattern: str, matches: list[int], rank: Rank) -> list[tuple[str, nn.Module]]:
    """The modules whose dotted name fits `pattern`, where `*` stands for one name.

    Raises PlanMismatch unless there are as many as the plan says for this rank's pipeline coordinate.
    """
    depth = pattern.count(".")
    found = [(n, m) for n, m in model.named_modules() if n.count(".") == depth and fnmatchcase(n, pattern)]
    expected = matches[rank.coordinates["pp"]]
    if len(found) != expected:
        raise PlanMismatch(f"`{pattern}` fits {len(found)} modules of the model, and the plan says {expected}")
    return found
