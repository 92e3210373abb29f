"""`model { frozen = … }`: which parameters are trained."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

from ...dsl.diagnostics.suggest import did_you_mean
from ...dsl.spec import Spec
from ..architecture import EMBEDDING, HEAD, Architecture, parameters
from ..findings import Findings

PATH: Final = "model.frozen"
_RANGE: Final = re.compile(r"(\d+)-(\d+)")


def covers(pattern: str, name: str) -> bool:
    """Whether a pattern means a parameter, or a module that it is in: part by part of their dotted names, `*` being any
    text inside a part and `0-3` the numbers 0 to 3."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) <= len(parts) and all(map(fits_part, wanted, parts))


def fits_part(wanted: str, part: str) -> bool:
    if found := _RANGE.fullmatch(wanted):
        return part.isdecimal() and int(found[1]) <= int(part) <= int(found[2])
    return fnmatchcase(part, wanted)


def frozen_names(arch: Architecture, patterns: Sequence[str]) -> frozenset[str]:
    """The parameters that are not trained: those that patterns mean, and beside an adapter all of the model but what
    the adapter says."""
    if (adapter := arch.adapter) is not None:
        own = (tensor.name for tensor in parameters(arch) if not tensor.adapter)
        return frozenset(name for name in own if not any(covers(each, name) for each in adapter.train))
    if not patterns:
        return frozenset()
    return frozenset(tensor.name for tensor in parameters(arch) if any(covers(each, tensor.name) for each in patterns))


def check_frozen(spec: Spec, arch: Architecture, found: Findings) -> None:
    """Every pattern must mean a parameter that no other before it does, and something must be left to train."""
    patterns = spec.model.frozen
    if not patterns or arch.adapter is not None:
        return
    names, frozen, idle = [tensor.name for tensor in parameters(arch)], set[str](), ""
    for pattern in patterns:
        meant = {name for name in names if covers(pattern, name)}
        if not meant:
            message = f"no parameter of the model is in `{pattern}`"
            found.fail(PATH, "X434", PATH, message, instead(pattern, names, arch))
            return
        idle = idle or (pattern if meant <= frozen else "")
        frozen |= meant
    if len(frozen) == len(names):
        message = "every parameter is frozen, so there is nothing to train"
        found.fail(PATH, "X434", PATH, message, "leave a part of the model out of frozen")
    elif idle:
        message = f"`{idle}` freezes nothing that the patterns before it do not freeze"
        found.warn(PATH, "W401", PATH, message, f"remove `{idle}`")
    else:
        found.passed(PATH, f"{len(frozen):,} of {len(names):,} tensors are frozen")


def instead(pattern: str, names: Iterable[str], arch: Architecture) -> str:
    """What to write in place of a pattern that means nothing."""
    if pattern.partition(".")[0] == HEAD and arch.tie_embeddings:
        return f"the head is the embedding: write `{EMBEDDING}`, or use tie_embeddings false"
    parts = pattern.split(".")
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
