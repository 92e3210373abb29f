"""How large the largest piece of a parameter is on a rank, from the axes that cut it."""

from math import prod

from attrs import frozen

from ..dsl.schema.parallel import Parallel
from .architecture import ParameterSpec
from .plan import Mesh

# The dimension tensor parallelism cuts: output features (0) or input features (1). Everything else is whole.
TP_DIMENSION = {
    "embed_tokens.weight": 0,
    "lm_head.weight": 0,
    "q_proj.weight": 0,
    "k_proj.weight": 0,
    "v_proj.weight": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "up_proj.weight": 0,
    "down_proj.weight": 1,
}


@frozen(kw_only=True)
class Cuts:
    """Into how many pieces the axes cut a parameter: dense ones by tp then fsdp, experts by ep then ep_fsdp."""

    tp: int
    fsdp: int
    ep: int
    ep_fsdp: int
    expert_dimension: int

    def largest(self, parameter: ParameterSpec) -> int:
        """Elements of the largest piece: a dimension that does not divide evenly leaves more to the first ranks."""
        shape = list(parameter.shape)
        if parameter.expert:
            shape[0] = -(-shape[0] // self.ep)
            shape[self.expert_dimension] = -(-shape[self.expert_dimension] // self.ep_fsdp)
        else:
            self._cut_tp(parameter.name, shape)
            shape[0] = -(-shape[0] // self.fsdp)
        return prod(shape)

    def gathered(self, parameter: ParameterSpec) -> int:
        """Elements of a piece before fsdp cuts it: what a rank holds while it computes."""
        shape = list(parameter.shape)
        if parameter.expert:
            shape[0] = -(-shape[0] // self.ep)
        else:
            self._cut_tp(parameter.name, shape)
        return prod(shape)

    def _cut_tp(self, name: str, shape: list[int]) -> None:
        dimension = TP_DIMENSION.get(".".join(name.split(".")[-2:]))
        if dimension is not None:
            shape[dimension] = -(-shape[dimension] // self.tp)


def folded_axes(parallel: Parallel) -> tuple[str, ...]:
    """The context axes that shard parameters together with fsdp."""
    return {"all": ("ring", "ulysses"), "ring_only": ("ring",), "ulysses_only": ("ulysses",), "none": ()}[
        parallel.cp.fold
    ]


def shard_axes(parallel: Parallel) -> tuple[str, ...]:
    """The axes over which a dense parameter is cut by fsdp."""
    return ("fsdp", *folded_axes(parallel))


def cuts_of(parallel: Parallel, mesh: Mesh, expert_widths: tuple[int, ...]) -> Cuts:
    """The cuts a mesh makes. `expert_widths` are dim 1 of the stacked expert matrices [E, K, N].

    Experts are cut along K, which leaves whole experts on a rank; torch wants that even, so otherwise along E.
    """
    ep, ep_fsdp = mesh.expert_axes[3].size, mesh.expert_axes[2].size
    even = all(width % ep_fsdp == 0 for width in expert_widths)
    return Cuts(
        tp=mesh.size("tp"),
        fsdp=prod(mesh.size(axis) for axis in shard_axes(parallel)),
        ep=ep,
        ep_fsdp=ep_fsdp,
        expert_dimension=1 if even else 0,
    )
