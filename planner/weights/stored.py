"""Under which names, and in which shapes, files of transformers have the parameters of a model.

A matrix is stored [out, in]. Experts lie there one by one, or as version 5 of transformers has them in memory: stacked,
with gate and up projections above each other.
"""

from collections.abc import Iterable, Iterator, Mapping

from attrs import field, frozen

from ..architecture import EMBEDDING, HEAD, Architecture, ParameterSpec


@frozen
class StoredPart:
    """A part of a parameter in a stored tensor, `name` of `shape`.

    expert: which of the parameter's first dimension it is; None: all of the parameter. stacked: the experts are the
    first dimension of the stored tensor as well. row: the first of its rows that belong to the parameter. transposed:
    rows of the stored matrix are columns here.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    stacked: bool = False
    row: int = 0
    transposed: bool = False


# One after the other as files may have them; the first whose tensors are all there is read.
Alternatives = tuple[tuple[StoredPart, ...], ...]


@frozen(kw_only=True)
class StoredNames:
    """What the names of a family's files are.

    modules: the start of a name inside a block → that in files that have experts one by one. matrices: the same of the
    matrices of an expert. ignored: ends of names that hold nothing that is learned.
    enclosed: where a model is a part of another, the start of its names in files of that → in files of its own. beside:
    starts of the names of other parts.
    """

    modules: Mapping[str, str] = field(factory=dict)
    matrices: Mapping[str, str] = field(factory=dict)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    enclosed: Mapping[str, str] = field(factory=dict)
    beside: tuple[str, ...] = ()

    def of(self, parameter: ParameterSpec, arch: Architecture) -> Alternatives:
        """Where a parameter may be, the usual form first."""
        if parameter.expert:
            return tuple(self._one_by_one(parameter)), tuple(_fused(parameter, arch))
        if parameter.name.startswith(f"{HEAD}."):
            return ((StoredPart(parameter.name, parameter.shape),),)
        plain = f"model.{parameter.name}"
        names = dict.fromkeys((self._renamed(plain), plain))
        return tuple((StoredPart(name, parameter.shape),) for name in names)

    def is_ignored(self, name: str) -> bool:
        return name.endswith(self.ignored) or name.startswith(self.beside)

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

    def _one_by_one(self, parameter: ParameterSpec) -> Iterator[StoredPart]:
        module, _, matrix = self._renamed(f"model.{parameter.name}").rpartition(".")
        experts, rows, columns = parameter.shape
        for expert in range(experts):
            name = f"{module}.{expert}.{self.matrices.get(matrix, matrix)}.weight"
            yield StoredPart(name, (columns, rows), expert=expert, transposed=True)


def _fused(parameter: ParameterSpec, arch: Architecture) -> Iterator[StoredPart]:
    module, _, matrix = f"model.{parameter.name}".rpartition(".")
    experts, rows, columns = parameter.shape
    shape, row, name = (experts, columns, rows), 0, f"{module}.{matrix}"
    if matrix in ("gate_proj", "up_proj"):
        name, shape = f"{module}.gate_up_proj", (experts, 2 * columns, rows)
        row = 0 if matrix == "gate_proj" else columns
    for expert in range(experts):
        yield StoredPart(name, shape, expert=expert, stacked=True, row=row, transposed=True)


EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"
HEAD_WEIGHT = f"{HEAD}.weight"
