"""Architecture of a model: every number resolved, and the names and shapes of all parameters that follow from it.

Shapes: D dim, F ffn, H query heads, K key/value heads, A head width, V vocabulary, E experts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from attrs import field, frozen

from xtrain.dsl.schema.adapters import Adapter, adapter_of
from xtrain.dsl.schema.losses import HeadKind
from xtrain.dsl.schema.model import FAMILIES, Model, ModelEnds
from xtrain.dsl.schema.model_config import Rope

if TYPE_CHECKING:
    from xtrain.blocks.adapted import AdaptedMatrix
    from xtrain.blocks.block import BlockPiece


EMBEDDING: Final = "embed_tokens"
HEAD: Final = "lm_head"
SCORE: Final = "score"
# Of a model with a head of rewards: why it generates nothing, and what to do.
NO_TEXTS: Final = ("the model gives rewards, and no probabilities of tokens", "remove it, or choose a loss of tokens")
# Of an `Architecture`: what its JSON has in another form.
LEFT_OUT: Final = ("own", "rope", "adapter", "head")


@frozen(cache_hash=True)  # asked for by every block of every forward
class RotaryAngles:
    """By how much positions turn queries and keys. width: how many numbers of a head are turned, in pairs. theta: base
    of the frequencies. rope: how they are scaled."""

    width: int
    theta: float
    rope: Rope


@frozen(kw_only=True)
class Architecture:
    """A decoder-only transformer with nothing left to choose.

    layers: its decoder blocks, and behind them the modules that predict further tokens (`mtp`), if it has any.
    own: settings that only its family has, as JSON. rope: left out of the JSON where positions are not scaled. adapter:
    what is trained beside its matrices; None: nothing is, and the JSON says nothing of it. head: left out where it
    gives logits; one of rewards is not tied.
    """

    family: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    qk_norm: bool
    init_std: float
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    router_score: str = "softmax"
    router_normalise: bool = True
    router_bias_speed: float = 0.0
    router_aux_loss: float = 0.0
    router_z_loss: float = 0.0
    rope: Rope = field(factory=Rope)
    own: Mapping[str, Any] = field(factory=dict, hash=False)
    adapter: Adapter | None = field(default=None, hash=False)
    head: HeadKind = "vocabulary"

    @property
    def head_module(self) -> str:
        """The module whose weight the head is."""
        if self.head == "reward":
            return SCORE
        return EMBEDDING if self.tie_embeddings else HEAD

    @property
    def head_shape(self) -> tuple[int, int]:
        return (1 if self.head == "reward" else self.vocab), self.dim

    @property
    def head_parameter(self) -> "BlockParameter":
        """The head of a vocabulary as a matrix that an adapter can be of; it has this name where it is the embedding as
        well."""
        name, shape = f"{HEAD}.weight", (self.vocab, self.dim)
        return BlockParameter(name=name, shape=shape, decays=True, initial="normal", cut="column")

    @property
    def head_matrices(self) -> "tuple[AdaptedMatrix, ...]":
        """What its adapter has beside the head of a vocabulary."""
        return () if self.adapter is None or self.head != "vocabulary" else self.adapter.on_head(self.base)

    def head_adapters(self) -> "Iterator[BlockParameter]":
        """The parameters of these."""
        for matrix in self.head_matrices:
            yield from (attrs.evolve(each, task=matrix.task) for each in matrix.parameters(self.head_parameter))

    @property
    def head_products(self) -> int:
        """Weights of the head that each token is multiplied with, once more for each module that predicts further
        tokens; that of rewards sees the last one of a sequence."""
        return 0 if self.head == "reward" else (1 + self.mtp) * self.vocab * self.dim

    @property
    def further_layers(self) -> range:
        """The numbers of the modules that predict further tokens, behind those of the blocks."""
        return range(self.blocks, self.layers)

    @property
    def embeds_behind(self) -> bool:
        """Whether the embedding is also read where the head is: by a head that is tied to it, or by modules that
        predict further tokens."""
        return self.tie_embeddings or self.mtp > 0

    @property
    def mtp(self) -> int:
        """How many of its layers, the last ones, are modules that predict further tokens."""
        return self.own.get("mtp", 0)

    @property
    def blocks(self) -> int:
        """How many of its layers are decoder blocks of the model itself."""
        return self.layers - self.mtp

    @property
    def core(self) -> "Architecture":
        """The model without modules that predict further tokens."""
        own = {name: value for name, value in self.own.items() if not name.startswith("mtp")}
        return attrs.evolve(self, layers=self.blocks, own=own) if self.mtp else self

    @property
    def base(self) -> "Architecture":
        """The model without adapter."""
        return self if self.adapter is None else attrs.evolve(self, adapter=None)

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def angles(self) -> RotaryAngles:
        """Those of layers that have no others."""
        return RotaryAngles(self.head_dim, self.rope_theta, self.rope)

    @property
    def kinds(self) -> "tuple[LayerKind, ...]":
        """The decoder blocks of its family, each with the layers that have it, in the order of the first of these.
        Raises KeyError for a family that is not registered."""
        return _kinds(self._family, self)

    @property
    def ends(self) -> ModelEnds:
        """What its family has beside the blocks. Raises KeyError for a family that is not registered."""
        return self._family.ends(self)

    @property
    def _family(self) -> type[Model]:
        return FAMILIES.of_users if "user" in self.own else FAMILIES[self.family]

    def block(self, layer: int) -> "BlockPiece":
        """That of one layer."""
        return next(kind.block for kind in self.kinds if layer in kind.layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers whose blocks have experts."""
        return tuple(sorted(layer for kind in self.kinds if kind.block.routes for layer in kind.layers))

    @property
    def title(self) -> str:
        """Its family, one of the user's own with its place."""
        user = self.own.get("user")
        return self.family if user is None else f"{self.family} of {user['module']}:{user['line']}"

    def to_json(self) -> dict[str, Any]:
        """All numbers by name, those of its family alone beside the others."""
        numbers = attrs.asdict(self, filter=lambda attribute, _: attribute.name not in LEFT_OUT, recurse=False)
        rope = {"rope": scaled} if (scaled := self.rope.resolved()) else {}
        adapter = {} if self.adapter is None else {"adapter": self.adapter.to_json()}
        head = {} if self.head == "vocabulary" else {"head": self.head}
        return {**numbers, **rope, **self.own, **adapter, **head}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Architecture":
        """The architecture with the values of `to_json`."""
        known = attrs.fields_dict(cls).keys() - {"own"}
        if isinstance(values.get("rope"), Mapping):
            values = {**values, "rope": Rope(**values["rope"])}
        if isinstance(values.get("adapter"), Mapping):
            values = {**values, "adapter": adapter_of(values["adapter"])}
        own = {name: value for name, value in values.items() if name not in known}
        return cls(**{name: value for name, value in values.items() if name in known}, own=own)


@frozen
class LayerKind:
    """Layers whose blocks are alike. layers: their numbers, in order."""

    block: "BlockPiece"
    layers: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.layers[0]


@lru_cache(maxsize=64)  # of many layouts that are compared, each asks, and often
def _kinds(family: type[Model], arch: Architecture) -> tuple[LayerKind, ...]:
    blocks: list[BlockPiece] = []
    layers: list[list[int]] = []
    plain = family.blocks(attrs.evolve(arch, layers=arch.blocks) if arch.mtp else arch)
    if arch.mtp:
        plain += (plain[-1].further(plus_one=family.ends(arch).norm_plus_one),) * arch.mtp
    for layer, block in enumerate(plain if arch.adapter is None else arch.adapter.on(plain, arch.base)):
        if block not in blocks:
            blocks.append(block)
            layers.append([])
        layers[blocks.index(block)].append(layer)
    return tuple(LayerKind(block, tuple(each)) for block, each in zip(blocks, layers, strict=True))


@frozen(kw_only=True)
class ParameterSpec:
    """A parameter: its name, its whole shape, and how the optimizer and a token's path treat it.

    trained: it has a gradient, and the optimizer a state of it. adapter: of what belongs to an adapter, the matrix that
    it is added to; empty: it is a parameter of the model itself. quantised: it is stored as the base of the plan says
    (`precision { base }`). task: whose adapter it belongs to, where there are several. begun: of what belongs to an
    adapter, what that has begun with, which is not trained.
    """

    name: str
    shape: tuple[int, ...]
    decays: bool
    expert: bool = False
    trained: bool = True
    adapter: str = ""
    quantised: bool = False
    task: str = ""
    begun: bool = False

    @property
    def size(self) -> int:
        product = 1
        for extent in self.shape:
            product *= extent
        return product


Initial = Literal["normal", "residual", "ones", "zeros"]
Partial = Literal["never", "by_position", "always"]


@frozen(kw_only=True)
class BlockParameter:
    """A parameter of a block.

    name: inside the block. initial: its first values; `residual`: normal, scaled down, of matrices whose output is
    added to the residual stream. cut: how tensor parallelism cuts it, by output features (column) or by input features
    (row); none: every rank has all of it. partial: when a rank has only a summand of the gradient of what is not cut:
    where tensor parallelism cuts the sequence, as the rank has used it on its own positions, or always. router: its
    products choose experts. adapter: of what belongs to an adapter, which gives it its first values, the matrix
    that it is added to. heads: how many heads of attention have a matrix of it each, side by side along the features
    by which it is cut. task, begun: as of a `ParameterSpec`.
    """

    name: str
    shape: tuple[int, ...]
    decays: bool
    initial: Initial
    expert: bool = False
    cut: Literal["column", "row"] | None = None
    partial: Partial = "never"
    router: bool = False
    adapter: str = ""
    heads: int = 1
    task: str = ""
    begun: bool = False

    @property
    def owner(self) -> str:
        """The module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or of experts a stack of them; one of a single row or column is a vector."""
        return len(self.shape) == (3 if self.expert else 2) and min(self.shape[-2:]) > 1


def parameters(arch: Architecture) -> Iterator[ParameterSpec]:
    """Every parameter in the order in which the model registers them.

    Matrices decay; norms and embeddings do not. A tied head is the embedding and is not listed again.
    """
    blocks = {layer: tuple(kind.block.parameters(arch)) for kind in arch.kinds for layer in kind.layers}
    yield ParameterSpec(name=f"{EMBEDDING}.weight", shape=(arch.vocab, arch.dim), decays=False)
    for layer in range(arch.layers):
        yield from (_of_layer(parameter, layer) for parameter in blocks[layer])
    yield ParameterSpec(name="norm.weight", shape=(arch.dim,), decays=False)
    if not arch.tie_embeddings:
        yield ParameterSpec(name=f"{arch.head_module}.weight", shape=arch.head_shape, decays=True)
    for each in arch.head_adapters():
        yield _spec(each, "")


@lru_cache(maxsize=64)
def widest_task(arch: Architecture) -> str:
    """The task whose adapter has the most parameters; of none, an empty name."""
    sizes = Counter[str]()
    for tensor in parameters(arch):
        if tensor.adapter:
            sizes[tensor.task] += tensor.size
    return max(sizes, key=sizes.__getitem__, default="")


def buffers(arch: Architecture) -> Iterator[ParameterSpec]:
    """The tensors beside parameters that a checkpoint has."""
    of_layer = {layer: kind.block.buffers(arch) for kind in arch.kinds for layer in kind.layers}
    for layer in range(arch.layers):
        for name, shape in of_layer[layer].items():
            yield ParameterSpec(name=f"layers.{layer}.{name}", shape=tuple(shape), decays=False)


def block_parameters(arch: Architecture, layer: int) -> Iterator[ParameterSpec]:
    """The parameters of the block of one layer."""
    return (_of_layer(parameter, layer) for parameter in arch.block(layer).parameters(arch))


def _of_layer(parameter: BlockParameter, layer: int) -> ParameterSpec:
    return _spec(parameter, f"layers.{layer}.")


def _spec(parameter: BlockParameter, before: str) -> ParameterSpec:
    """before: what names of the model have in front of those of the block."""
    return ParameterSpec(
        name=f"{before}{parameter.name}",
        shape=parameter.shape,
        decays=parameter.decays,
        expert=parameter.expert,
        adapter=parameter.adapter and f"{before}{parameter.adapter}",
        task=parameter.task,
        begun=parameter.begun,
    )


def name_in_block(name: str) -> str:
    """The name of a block's parameter without its layer; empty for those of the ends of a model."""
    return name.split(".", 2)[2] if name.startswith("layers.") else ""


# Of the module of a matrix: what holds the adapters of tasks.
TASKS: Final = "tasks"


def task_in(name: str) -> str:
    """The task whose adapter a parameter is of, by its name; empty: of none."""
    return name.partition(f".{TASKS}.")[2].partition(".")[0]


def expert_module(arch: Architecture) -> str:
    """The module of a block whose parameters are the experts'. Raises StopIteration where there are none."""
    return next(each.owner for kind in arch.kinds for each in kind.block.parameters(arch) if each.expert)


def expert_widths(arch: Architecture) -> Set[int]:
    """All extents of the matrices of experts, those of an adapter among them."""
    widths = {arch.dim, arch.expert_ffn}
    if arch.adapter is None:
        return widths
    all_parameters = (each for kind in arch.kinds for each in kind.block.parameters(arch))
    return widths | {extent for each in all_parameters if each.expert for extent in each.shape[1:]}


def pairs_within(length: int, window: int | None) -> int:
    """Pairs of positions of a document of so many that lie less than `window` apart, before or behind."""
    if window is None or window >= length:
        return length**2
    return length * (2 * window - 1) - window * (window - 1)
