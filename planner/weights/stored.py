"""Under which names, and in which shapes, files of transformers have the parameters of a model.

A matrix is stored [out, in]. Experts lie there one by one, or stacked, with gate and up projections in one tensor.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final, Literal

from attrs import field, frozen

from xtrain.planner.architecture import EMBEDDING, HEAD, SCORE, Architecture, ParameterSpec

LAYERS: Final = "model.layers."


@frozen
class StoredPart:
    """A part of a parameter in a stored tensor, `name` of `shape`.

    expert: which of the parameter's first dimension it is; None: all of the parameter. transposed: rows of the stored
    matrices are columns here. first, step: the index i of the parameter's last dimension is first + step · i of the
    stored one. Parts with a step, of which as many parameters lie in turns, are not transposed.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    transposed: bool = False
    first: int = 0
    step: int = 1


# One after the other as files may have them; the first whose tensors are all there is read.
Alternatives = tuple[tuple[StoredPart, ...], ...]


# one_by_one: a tensor for each matrix of each expert. stacked: as version 5 of transformers has most models in memory,
# [E, out, in], with gate and up projections above each other. interleaved: [E, in, out], with their columns in turns.
ExpertsForm = Literal["one_by_one", "stacked", "interleaved"]


@frozen(kw_only=True)
class StoredNames:
    """What the names of a family's files are.

    modules: the start of a name inside a block → that in files. matrices: the same of the matrices of an expert, where
    they lie one by one. experts: the forms that experts may have in files, the usual one first; of the others modules
    have the names that they have here. ignored: ends of names that hold nothing that is learned.
    enclosed: where a model is a part of another, the start of its names in files of that → in files of its own. beside:
    starts of the names of other parts. buffers: ends of names of tensors beside parameters that files have.
    further_tokens: a matrix of this name is in layers behind the last one that predict further tokens, as DeepSeek-V3
    stores them: with copies of the embedding and of the head. Those beyond what the model has are no part of it. Empty:
    files have no such layers.
    """

    modules: Mapping[str, str] = field(factory=dict)
    matrices: Mapping[str, str] = field(factory=dict)
    experts: tuple[ExpertsForm, ...] = ("one_by_one", "stacked")
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    enclosed: Mapping[str, str] = field(factory=dict)
    beside: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    further_tokens: str = ""

    def of(self, parameter: ParameterSpec) -> Alternatives:
        """Where a parameter may be, the usual form first."""
        if parameter.expert:
            return tuple(self._experts(parameter, form) for form in self.experts)
        if parameter.name in (HEAD_WEIGHT, SCORE_WEIGHT):
            return ((StoredPart(parameter.name, parameter.shape),),)
        plain = f"model.{of_module(parameter.name)}"
        names = dict.fromkeys((self._renamed(plain), plain))
        return tuple((StoredPart(name, parameter.shape),) for name in names)

    def is_ignored(self, name: str, arch: Architecture, stored: Container[str]) -> bool:
        """Whether a stored tensor is no part of the model. stored: the names of all."""
        if name.endswith(self.ignored) or name.startswith(self.beside):
            return True
        if not self.further_tokens or not name.startswith(LAYERS):
            return False
        layer, _, inside = name.removeprefix(LAYERS).partition(".")
        number = int(layer) if layer.isdecimal() else -1
        if number in arch.further_layers:
            return inside in COPIES
        return number >= arch.layers and f"{LAYERS}{layer}.{self.further_tokens}" in stored

    def modules_in(self, arch: Architecture, stored: Iterable[str]) -> int:
        """How many modules that predict further tokens files have behind the blocks of a model."""
        if not self.further_tokens:
            return 0
        layers = (name.removeprefix(LAYERS).partition(".") for name in stored if name.startswith(LAYERS))
        return sum(inside == self.further_tokens and int(layer) >= arch.blocks for layer, _, inside in layers)

    def stored_part(self, arch: Architecture) -> Architecture:
        """The model that files have: that of a family without a place for modules that predict further tokens, without
        these."""
        return arch if self.further_tokens else arch.core

    def copies(self, arch: Architecture) -> Iterator[tuple[str, str]]:
        """Names of tensors that files have once more in each module, and of the parameters that they are."""
        if self.further_tokens:
            for layer in arch.further_layers:
                for inside, parameter in zip(COPIES, (EMBEDDING_WEIGHT, f"{arch.head_module}.weight"), strict=True):
                    yield f"{LAYERS}{layer}.{inside}", parameter

    def own_names(self, stored: Iterable[str]) -> dict[str, str]:
        """Name in files of the model alone → stored name."""
        found: dict[str, str] = {}
        for name in stored:
            start = next((each for each in self.enclosed if name.startswith(each)), "")
            found[self.enclosed.get(start, "") + name.removeprefix(start)] = name
        return found

    def _renamed(self, name: str) -> str:
        for ours, theirs in self.modules.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
        return name

    def _experts(self, parameter: ParameterSpec, form: ExpertsForm) -> tuple[StoredPart, ...]:
        if form == "one_by_one":
            return tuple(self._one_by_one(parameter))
        return (_fused(parameter, interleaved=form == "interleaved"),)

    def _one_by_one(self, parameter: ParameterSpec) -> Iterator[StoredPart]:
        module, _, matrix = self._renamed(f"model.{parameter.name}").rpartition(".")
        experts, rows, columns = parameter.shape
        for expert in range(experts):
            name = f"{module}.{expert}.{self.matrices.get(matrix, matrix)}.weight"
            yield StoredPart(name, (columns, rows), expert=expert, transposed=True)


def _fused(parameter: ParameterSpec, *, interleaved: bool) -> StoredPart:
    """The experts of a parameter: matrices [E, in, out], or biases [E, out]."""
    module, _, name = f"model.{parameter.name}".rpartition(".")
    *others, width = parameter.shape
    first, step = 0, 1
    if (matrix := name.removesuffix("_bias")) in GATE_UP:
        name = name.replace(matrix, "gate_up_proj")
        first = GATE_UP.index(matrix) * (1 if interleaved else width)
        step = 2 if interleaved else 1
        width *= 2
    transposed = not interleaved and len(others) > 1
    shape = (others[0], width, others[1]) if transposed else (*others, width)
    return StoredPart(f"{module}.{name}", shape, transposed=transposed, first=first, step=step)


def of_module(name: str) -> str:
    """The name in files of a parameter of a block, which is another in modules that predict further tokens."""
    start, dot, inside = name.partition(".join.")
    if dot:
        return f"{start}.{inside}"
    found = re.fullmatch(r"(layers\.\d+)\.norm\.weight", name)
    return name if found is None else f"{found[1]}.shared_head.norm.weight"


COPIES: Final = ("embed_tokens.weight", "shared_head.head.weight")
GATE_UP: Final = ("gate_proj", "up_proj")
EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"
HEAD_WEIGHT = f"{HEAD}.weight"
SCORE_WEIGHT = f"{SCORE}.weight"
