"""`model { frozen = … }`: which parameters are trained."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import EMBEDDING, HEAD, SCORE, Architecture, parameters
from xtrain.planner.findings import Findings

PATH: Final = "model.frozen"
ANY_PARTS: Final = "**"
_RANGE: Final = re.compile(r"(\d+)-(\d+)")


@lru_cache(maxsize=1 << 16)  # asked of every parameter by whatever counts bytes
def covers(pattern: str, name: str) -> bool:
    """Whether a pattern means a parameter, or a module that it is in: part by part of their dotted names, `*` being any
    text inside a part, `0-3` the numbers 0 to 3, and `**` any parts."""
    return _covers(pattern.split("."), name.split("."))


def _covers(wanted: Sequence[str], parts: Sequence[str]) -> bool:
    if ANY_PARTS in wanted:
        at = wanted.index(ANY_PARTS)
        before, behind = wanted[:at], wanted[at + 1 :]
        return _covers(before, parts[:at]) and any(_covers(behind, parts[start:]) for start in range(at, len(parts)))
    return len(wanted) <= len(parts) and all(map(fits_part, wanted, parts))


def fits_part(wanted: str, part: str) -> bool:
    if found := _RANGE.fullmatch(wanted):
        return part.isdecimal() and int(found[1]) <= int(part) <= int(found[2])
    return fnmatchcase(part, wanted)


def blocks_beyond(pattern: str, arch: Architecture) -> tuple[str, str] | None:
    """What is said of a pattern with blocks that the model does not have behind some that it has: what is wrong, and
    what to do."""
    for part in pattern.split("."):
        found = _RANGE.fullmatch(part)
        if found is not None and int(found[1]) < arch.layers <= int(found[2]):
            last = arch.layers - 1
            there = f"{found[1]}-{last}" if int(found[1]) < last else f"{last}"
            return f"`{pattern}` goes beyond the model, whose blocks are 0 to {last}", f"write `{there}`"
    return None


def frozen_names(arch: Architecture, patterns: Sequence[str]) -> frozenset[str]:
    """The parameters that are not trained: those that patterns mean, and beside an adapter all of the model but what
    the adapter says and a head of rewards, and what it has begun with."""
    if (adapter := arch.adapter) is not None:
        trained = (*adapter.train, *((SCORE,) if arch.head == "reward" else ()))
        own = (tensor.name for tensor in parameters(arch) if not tensor.adapter)
        model = (name for name in own if not any(covers(each, name) for each in trained))
        return frozenset(model) | {tensor.name for tensor in parameters(arch) if tensor.begun}
    if not patterns:
        return frozenset()
    return frozenset(tensor.name for tensor in parameters(arch) if any(covers(each, tensor.name) for each in patterns))


def check_frozen(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Every pattern must mean a parameter that no other before it does, and something must be left to train."""
    patterns = spec.model.frozen
    if not patterns or arch.adapter is not None:
        return
    names, frozen = [tensor.name for tensor in parameters(arch)], set[str]()
    idle: tuple[str, str] | None = None
    beyond: tuple[str, str, str] | None = None
    for number, pattern in enumerate(patterns):
        meant, path = {name for name in names if covers(pattern, name)}, f"{PATH}.{number}"
        if not meant:
            message = f"no parameter of the model is in `{pattern}`"
            found.fail(PATH, "X434", path, message, instead(pattern, names, arch))
            return
        idle = idle or ((path, pattern) if meant <= frozen else None)
        if beyond is None and (wrong := blocks_beyond(pattern, arch)) is not None:
            beyond = (path, *wrong)
        frozen |= meant
    if len(frozen) == len(names):
        message = "every parameter is frozen, so there is nothing to train"
        found.fail(PATH, "X434", PATH, message, "leave a part of the model out of frozen")
    elif idle is not None:
        path, pattern = idle
        message = f"`{pattern}` freezes nothing that the patterns before it do not freeze"
        found.warn(PATH, "W401", path, message, f"remove `{pattern}`")
    elif beyond is not None:
        path, message, hint = beyond
        found.warn(PATH, "W401", path, message, hint)
    else:
        found.passed(PATH, f"{len(frozen):,} of {len(names):,} tensors are frozen")


def instead(pattern: str, names: Iterable[str], arch: Architecture) -> str:
    """What to write in place of a pattern that means nothing."""
    if pattern.partition(".")[0] == HEAD and arch.tie_embeddings:
        return f"the head is the embedding: write `{EMBEDDING}`, or use tie_embeddings false"
    parts = pattern.split(".")
    if ANY_PARTS in parts:
        every = list(dict.fromkeys(part for name in names for part in name.split(".")))
        near = (did_you_mean(part, every) for part in parts if not any(fits_part(part, each) for each in every))
        return next(near, None) or "name modules or parameters as the plan does"
    for depth, part in enumerate(parts):
        inside = [name for name in names if covers(".".join([*parts[:depth], "*"]), name)]
        there = list(dict.fromkeys(name.split(".")[depth] for name in inside))
        if any(fits_part(part, each) for each in there):
            continue
        if there and all(each.isdecimal() for each in there):
            return f"the blocks are 0 to {arch.layers - 1}"
        before = ".".join(parts[:depth])
        where = f"in `{before}` there are" if before else "the model has"
        return did_you_mean(part, there) or f"{where} {', '.join(there)}" if there else f"`{before}` is a parameter"
    return "name modules or parameters as the plan does"
