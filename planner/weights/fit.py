"""The parameters of a model held against the tensors of a folder: every one has its place, and nothing is left over."""

from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve, frozen

from xtrain.dsl.schema.model import FAMILIES
from xtrain.planner.architecture import Architecture, buffers, parameters
from xtrain.planner.weights.files import LOADED, WeightFiles
from xtrain.planner.weights.stored import EMBEDDING_WEIGHT, HEAD_WEIGHT, SCORE_WEIGHT, StoredPart

EMBEDDING_STORED = f"model.{EMBEDDING_WEIGHT}"


def has_rewards(arch: Architecture, files: WeightFiles) -> bool:
    """Whether the folder has a head of rewards."""
    return SCORE_WEIGHT in FAMILIES[arch.family].stored.own_names(files.tensors)


def draws_head(arch: Architecture, files: WeightFiles) -> bool:
    """Whether the model gives rewards by a head that its folder, one of a language model, does not have."""
    return arch.head == "reward" and not has_rewards(arch, files)


@frozen
class Assignment:
    """parts: parameter or buffer → the parts of stored tensors that it is read from; without a head of rewards where
    the folder is that of a language model. twin: the stored head of a tied model, which must be equal to the embedding;
    empty where there is none."""

    parts: dict[str, tuple[StoredPart, ...]]
    twin: str = ""


def stored_rows(arch: Architecture, files: WeightFiles) -> int:
    """How many rows of a model's embedding a folder has; all of them where it has no embedding."""
    names = FAMILIES[arch.family].stored
    stored = files.tensors.get(names.own_names(files.tensors).get(EMBEDDING_STORED, ""))
    return min(arch.vocab, stored.shape[0]) if stored is not None and stored.shape else arch.vocab


def assign(arch: Architecture, files: WeightFiles, *, grows: bool = False) -> Assignment:
    """Where every parameter is read that files of the family have. Raises ValueError, whose text names what is wrong,
    if the folder does not fit.

    grows: the embedding and head of the model may have more rows than those of the files.
    """
    names = FAMILIES[arch.family].stored
    assert names is not None, f"{arch.family} has no files"
    arch = names.stored_part(arch)
    arch = evolve(arch, vocab=stored_rows(arch, files)) if grows else arch
    own = names.own_names(files.tensors)
    found: dict[str, tuple[StoredPart, ...]] = {}
    missing: list[str] = []
    for parameter in (*parameters(arch.base), *(each for each in buffers(arch) if each.name.endswith(names.buffers))):
        ways = names.of(parameter)
        chosen = next((parts for parts in ways if all(part.name in own for part in parts)), None)
        if chosen is None and parameter.name == SCORE_WEIGHT:
            continue
        if chosen is None:  # once, whatever lies in it
            missing += [part.name for part in ways[0] if part.name not in own and part.name not in missing]
        else:
            found[parameter.name] = tuple(_as_stored(part, own) for part in chosen)
    used = {part.name: part.shape for parts in found.values() for part in parts}
    twin = own.get(HEAD_WEIGHT, "") if arch.tie_embeddings else ""
    if twin and EMBEDDING_WEIGHT in found:
        used[twin] = found[EMBEDDING_WEIGHT][0].shape
    unused = {own[HEAD_WEIGHT]} if arch.head == "reward" and HEAD_WEIGHT in own else set[str]()
    surplus = [
        name
        for name in files.tensors
        if name not in used and name not in unused and not names.is_ignored(name, arch, files.tensors)
    ]
    if problems := wrong_tensors(files, used, missing, surplus):
        raise ValueError("; ".join(problems))
    return Assignment(found, twin)


def wrong_tensors(
    files: WeightFiles, used: Mapping[str, tuple[int, ...]], missing: Sequence[str], surplus: Sequence[str]
) -> list[str]:
    """What is wrong, in words. used: tensor → its shape in the model. missing: those of them that no file has; surplus:
    those that belong to nothing."""
    placed = [f"`{name}` of {files.tensors[name].file}" for name in surplus]
    return [
        *_listed([f"`{name}`" for name in missing], "missing"),
        *_listed(placed, "not of this model"),
        *_mismatches({name: shape for name, shape in used.items() if name not in missing}, files),
    ]


def _as_stored(part: StoredPart, own: Mapping[str, str]) -> StoredPart:
    name = own[part.name]
    return part if name == part.name else evolve(part, name=name)


def _mismatches(used: Mapping[str, tuple[int, ...]], files: WeightFiles) -> Iterator[str]:
    """Tensors of another shape than planned, or in a format that is none of weights."""
    shapes = [name for name, shape in used.items() if files.tensors[name].shape != shape]
    if shapes:
        name = shapes[0]
        stored, planned = (" × ".join(map(str, each)) for each in (files.tensors[name].shape, used[name]))
        more = f", and {len(shapes) - 1:,} more have another shape" if len(shapes) > 1 else ""
        yield f"`{name}` is {stored} in {files.tensors[name].file} and {planned} in the model{more}"
    formats = [name for name in used if files.tensors[name].format not in LOADED]
    if formats:
        name = formats[0]
        more = f", and {len(formats) - 1:,} more" if len(formats) > 1 else ""
        stored = files.tensors[name]
        yield f"`{name}` is stored as {stored.format} in {stored.file}, which is no format of weights{more}"


def _listed(names: Sequence[str], what: str) -> Iterator[str]:
    if names:
        shown = ", ".join(names[:3])
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        yield f"{shown}{more} {'is' if len(names) == 1 else 'are'} {what}"
