"""Stored names of families whose files have several matrices of a layer in one tensor."""

from collections.abc import Iterator, Mapping, Sequence

from attrs import field

from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.weight_files import Alternatives, StoredNames, StoredPart

Rows = Sequence[tuple[str, int]]
"""Parameters of a stored tensor with their rows, one after the other."""


@frozen(kw_only=True)
class JoinedNames(StoredNames):
    """Stored names of a family whose files have several parameters in one tensor. joined: module → stored tensor → its
    rows. groups: number of parts of such a tensor, each with a share of the rows of every parameter; by default one."""

    joined: Mapping[str, Mapping[str, Rows]]
    groups: Mapping[str, int] = field(factory=dict)

    def of(self, parameter: ParameterSpec) -> Alternatives:
        if (place := self._place(parameter)) is None:
            return super().of(parameter)
        path, name, stored, rows = place
        return (tuple(self._parts(path, stored, rows, name, parameter.shape)),)

    def in_modules(self, parameter: ParameterSpec) -> tuple[StoredPart, ...]:
        """Return the parts as `StoredNames` does; of a tensor with several parameters, each under a name of its own."""
        place = self._place(parameter)
        if place is None or len(place[3]) == 1:
            return super().in_modules(parameter)
        return (StoredPart(place[0] + place[1], parameter.shape),)

    def _place(self, parameter: ParameterSpec) -> tuple[str, str, str, Rows] | None:
        """Return path of the module, name inside, and tensor with its rows; None for other parameters."""
        for module, tensors in self.joined.items():
            start, found, name = parameter.name.partition(f".{module}.")
            stored = next((tensor for tensor, rows in tensors.items() if name in dict(rows)), "") if found else ""
            if stored:
                return self._renamed(f"model.{start}{found}"), name, stored, tensors[stored]
        return None

    def _parts(self, module: str, stored: str, rows: Rows, name: str, shape: tuple[int, ...]) -> Iterator[StoredPart]:
        groups = self.groups.get(stored, 1)
        total, top, count = sum(each for _, each in rows), 0, dict(rows)[name] // groups
        for other, each in rows:
            if other == name:
                break
            top += each // groups
        for group in range(groups):
            own = None if groups == 1 else (group * count, (group + 1) * count)
            first = group * total // groups + top
            yield StoredPart(f"{module}{stored}", (total, *shape[1:]), rows=own, top=first)


def gate_up(arch: Architecture) -> Mapping[str, Rows]:
    """Return the rows of the tensor with gate and up projection of a SwiGLU."""
    return {"gate_up_proj.weight": [("gate_proj.weight", arch.ffn), ("up_proj.weight", arch.ffn)]}
