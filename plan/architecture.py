"""Architecture of a model: every number resolved, and the names and shapes of all parameters.

Shapes: D dim, F ffn, H query heads, K key/value heads, A head width, V vocabulary, E experts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal, Protocol, cast

import attrs
from attrs import field

from xtrain.dsl.schema.adapters import Adapter, adapter_of
from xtrain.dsl.schema.losses import HeadKind
from xtrain.dsl.schema.model import FAMILIES, ModelEnds
from xtrain.dsl.schema.model_config import HARMLESS_TO_CODE, is_metadata
from xtrain.dsl.schema.rope import Rope
from xtrain.lazy_attrs import frozen

EMBEDDING: Final = "embed_tokens"
HEAD: Final = "lm_head"
INDEXER: Final = ".indexer."  # in names of the parameters of indexers
SCORE: Final = "score"
# Reason why a model with a reward head generates no text, and the remedy.
NO_TEXTS: Final = ("the model gives rewards instead of token probabilities", "remove it, or choose a loss of tokens")
# Fields of `Architecture` that its JSON writes in another form.
LEFT_OUT: Final = ("own", "rope", "adapter", "head")


@frozen(cache_hash=True)  # read by every block of every forward
class RotaryAngles:
    """Rotation of queries and keys by their positions. width: numbers of a head that are rotated, in pairs. theta: base
    of the frequencies. rope: scaling of the frequencies. growth: factor of queries, see `AttentionLayer`."""

    width: int
    theta: float
    rope: Rope
    growth: float = 0.0


@frozen(kw_only=True)
class Architecture:
    """Decoder-only transformer with every choice made.

    layers: its decoder blocks, followed by the modules that predict further tokens (`mtp`), if any. own: settings that
    only its family has, as JSON. rope: omitted from the JSON if positions are not scaled. adapter: matrices trained
    next to the model's; None, and omitted from the JSON, without an adapter. head: omitted from the JSON if it gives
    logits; a reward head is not tied.
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
    def has_logits(self) -> bool:
        """True if the head gives logits of the next token; a reward head gives one number per sequence."""
        return self.head == "vocabulary"

    @property
    def head_module(self) -> str:
        """Module whose weight is the head."""
        if not self.has_logits:
            return SCORE
        return EMBEDDING if self.tie_embeddings else HEAD

    @property
    def head_shape(self) -> tuple[int, int]:
        return (self.vocab if self.has_logits else 1), self.dim

    @property
    def head_parameter(self) -> "BlockParameter":
        """Vocabulary head as a matrix that can have an adapter; it has this name even if it is tied to the
        embedding."""
        name, shape = f"{HEAD}.weight", (self.vocab, self.dim)
        return BlockParameter(name=name, shape=shape, decays=True, initial="normal", cut="column")

    @property
    def head_matrices(self) -> "tuple[AdaptedHead, ...]":
        """Adapters of the vocabulary head."""
        return self._family.head_matrices(self)

    def head_adapters(self) -> "Iterator[BlockParameter]":
        """Yield the parameters of the head's adapters."""
        for matrix in self.head_matrices:
            yield from (attrs.evolve(each, task=matrix.task) for each in matrix.parameters(self.head_parameter))

    @property
    def head_products(self) -> int:
        """Weights of the head that each token is multiplied with, once more for each module that predicts further
        tokens; 0 for a reward head, which sees only the last token of a sequence."""
        return (1 + self.mtp) * self.vocab * self.dim if self.has_logits else 0

    @property
    def further_layers(self) -> range:
        """Layer numbers of the modules that predict further tokens, after the layers of the blocks."""
        return range(self.blocks, self.layers)

    @property
    def embeds_behind(self) -> bool:
        """True if the last stage also reads the embedding: the head is tied to it, or modules predict further
        tokens."""
        return self.tie_embeddings or self.mtp > 0

    @property
    def mtp(self) -> int:
        """Number of modules that predict further tokens: the last layers."""
        return self.own.get("mtp", 0)

    @property
    def blocks(self) -> int:
        """Number of decoder blocks of the model itself."""
        return self.layers - self.mtp

    @property
    def core(self) -> "Architecture":
        """Model without the modules that predict further tokens."""
        own = {name: value for name, value in self.own.items() if not name.startswith("mtp")}
        return attrs.evolve(self, layers=self.blocks, own=own) if self.mtp else self

    @property
    def base(self) -> "Architecture":
        """Model without adapter."""
        return self if self.adapter is None else attrs.evolve(self, adapter=None)

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def angles(self) -> RotaryAngles:
        """RoPE angles of layers that have no angles of their own."""
        return RotaryAngles(self.head_dim, self.rope_theta, self.rope)

    @property
    def kinds(self) -> "tuple[LayerKind, ...]":
        """Distinct decoder blocks of its family, each with its layers, ordered by first layer. Raises KeyError if the
        family is not registered."""
        return _kinds(self._family, self)

    @property
    def learning_indexers(self) -> int:
        """Number of blocks whose indexer learns from a loss of its own."""
        kinds = (
            each for each in self.kinds if any(layer.index_loss and not layer.takes for layer in each.block.layers())
        )
        return sum(len(each.layers) for each in kinds)

    @property
    def ends(self) -> ModelEnds:
        """Modules of the family before and after the blocks. Raises KeyError if the family is not registered."""
        return self._family.ends(self)

    @property
    def other_ends(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of every parameter outside blocks, embedding and head."""
        others = self.ends.others
        return (("norm.weight", (self.dim,)),) if others is None else others

    @property
    def _family(self) -> "BlockFamily":
        return cast("BlockFamily", FAMILIES.of_users if "user" in self.own else FAMILIES[self.family])

    def kind_of(self, layer: int) -> "LayerKind":
        """Return the kind of layers that a layer belongs to."""
        return next(kind for kind in self.kinds if layer in kind.layers)

    @property
    def key_heads(self) -> tuple[int, ...]:
        """Distinct numbers of key/value heads of its layers, in order."""
        layers = [layer for kind in self.kinds for layer in kind.block.layers() if layer.attends]
        return tuple(sorted({layer.own(self).kv_heads for layer in layers} or {self.kv_heads}))

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers whose blocks have experts."""
        return tuple(sorted(layer for kind in self.kinds if kind.block.routes for layer in kind.layers))

    @property
    def title(self) -> str:
        """Family name; a user's family with its module and line, and transformers' code with its class and version."""
        if (code := self.own.get("code")) is not None:
            if (place := code.get("remote")) is not None:
                where = place.get("folder") or place["repo"]
                return f"{code['class']} of the modeling files {code['digest']} of {where}"
            return f"{code['class']} of transformers {code['versions']['transformers']}"
        user = self.own.get("user")
        return self.family if user is None else f"{self.family} of {user['module']}:{user['line']}"

    def to_json(self) -> dict[str, Any]:
        """Return all numbers by name, the family's own settings among them."""
        numbers = attrs.asdict(self, filter=lambda attribute, _: attribute.name not in LEFT_OUT, recurse=False)
        rope = {"rope": scaled} if (scaled := self.rope.resolved()) else {}
        adapter = {} if self.adapter is None else {"adapter": self.adapter.to_json()}
        head = {} if self.has_logits else {"head": self.head}
        return {**numbers, **rope, **self.own, **adapter, **head}

    @property
    def identity(self) -> dict[str, Any]:
        """Return what decides the parameters and the computation, as JSON: of a model of transformers' code its class
        and config, without keys that describe the file."""
        content = {name: value for name, value in self.to_json().items() if name != "mixers"}
        if (code := self.own.get("code")) is None:
            return content
        config = {name: value for name, value in code["config"].items() if not is_metadata(name, HARMLESS_TO_CODE)}
        sizes = dict.fromkeys(("experts", "experts_per_token", "expert_ffn"), 0)  # they follow from the config
        files = {"digest": code["digest"]} if "remote" in code else {}
        return {**content, **sizes, "code": {"class": code["class"], **files, **config}}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Architecture":
        """Return the architecture with the values of `to_json`."""
        known = attrs.fields_dict(cls).keys() - {"own"}
        if isinstance(values.get("rope"), Mapping):
            rope: dict[str, Any] = dict(values["rope"])
            lists = {name: tuple(each) for name, each in rope.items() if isinstance(each, list)}
            values = {**values, "rope": Rope(**{**rope, **lists})}
        if isinstance(values.get("adapter"), Mapping):
            values = {**values, "adapter": adapter_of(values["adapter"])}
        own = {name: value for name, value in values.items() if name not in known}
        return cls(**{name: value for name, value in values.items() if name in known}, own=own)


@frozen
class LayerKind:
    """Layers with equal blocks. layers: their numbers, in order."""

    block: "FamilyBlock"
    layers: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.layers[0]


class BlockLayer(Protocol):
    """Layer of a decoder block; the classes are in `blocks/`, and `Layer` there describes the members."""

    reads: ClassVar[tuple[str, ...]]
    adapts: ClassVar[bool]
    attends: ClassVar[bool]
    keeps_state: ClassVar[bool]
    window: ClassVar[int | None]
    gives: ClassVar[str]
    takes: ClassVar[str]
    whole_rows: ClassVar[bool]
    index_loss: ClassVar[float]

    @property
    def name(self) -> str: ...
    @property
    def tiles(self) -> bool: ...
    def parameters(self, arch: Architecture) -> Iterator["BlockParameter"]: ...
    def words(self, arch: Architecture) -> tuple[str, ...]: ...
    def pair_flops(self, arch: Architecture) -> int: ...
    def own(self, arch: Architecture) -> Architecture: ...
    def shares_experts(self, arch: Architecture) -> bool: ...
    def position_flops(self, arch: Architecture) -> int: ...
    def spread_heads(self, arch: Architecture) -> tuple[int, str] | None: ...
    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int: ...


class FamilyBlock(Protocol):
    """Decoder block; the classes are in `blocks/`, and `BlockPiece` there describes the members."""

    @property
    def tiles(self) -> bool: ...
    @property
    def routes(self) -> bool: ...
    def layers(self) -> Iterator[BlockLayer]: ...
    def parameters(self, arch: Architecture) -> Iterator["BlockParameter"]: ...
    def buffers(self, arch: Architecture) -> dict[str, list[int]]: ...
    def angles(self, arch: Architecture) -> RotaryAngles | None: ...


class AdaptedHead(Protocol):
    """Adapter of the head; the class is `AdaptedMatrix` in `blocks/`."""

    @property
    def name(self) -> str: ...
    @property
    def task(self) -> str: ...
    def parameters(self, matrix: "BlockParameter") -> Iterator["BlockParameter"]: ...


class BlockFamily(Protocol):
    """Model family as an architecture uses it; its base class is `PlannedModel` (`contracts/models.py`)."""

    def adapted_blocks(self, arch: Architecture) -> tuple[FamilyBlock, ...]: ...
    def head_matrices(self, arch: Architecture) -> tuple[AdaptedHead, ...]: ...
    def ends(self, arch: Architecture) -> ModelEnds: ...


@lru_cache(maxsize=64)  # comparing layouts asks often for the same architectures
def _kinds(family: BlockFamily, arch: Architecture) -> tuple[LayerKind, ...]:
    blocks: list[FamilyBlock] = []
    layers: list[list[int]] = []
    for layer, block in enumerate(family.adapted_blocks(arch)):
        if block not in blocks:
            blocks.append(block)
            layers.append([])
        layers[blocks.index(block)].append(layer)
    return tuple(LayerKind(block, tuple(each)) for block, each in zip(blocks, layers, strict=True))


@frozen(kw_only=True)
class ParameterSpec:
    """Parameter: its name, its whole shape, and how the optimizer treats it.

    trained: it has a gradient and optimizer state. adapter: the matrix that an adapter's parameter is added to; empty
    for a parameter of the model itself. quantised: it is stored in the format of the base (`precision { base }`). task:
    the task that owns the adapter, if there are several. begun: stored initial value of an adapter's parameter, which
    is not trained. multiplied: share of it that a token is multiplied with, unless it is of an expert.
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
    multiplied: float = 1.0

    @property
    def size(self) -> int:
        product = 1
        for extent in self.shape:
            product *= extent
        return product


Initial = Literal["normal", "residual", "ones", "zeros", "log_uniform", "softplus"]
Partial = Literal["never", "by_position", "always"]


@frozen(kw_only=True)
class BlockParameter:
    """Parameter of a block.

    name: inside the block. initial: its first values; `residual`: normal, scaled down, for matrices whose output is
    added to the residual stream; `log_uniform`: logarithms of numbers from 0.01 to 16; `softplus`: numbers whose
    softplus is from 0.001 to 0.1. cut: by output features (column) or by input features (row) under tensor parallelism;
    None: every rank holds all of it. partial: when a rank has only a summand of the gradient of an uncut parameter:
    never, by position (tensor parallelism cuts the sequence, so the rank used it on its own positions), or always.
    router: its products choose experts. adapter: for an adapter's parameter, the matrix that it is added to; the
    adapter sets its first values. heads: number of attention heads that have a matrix of it each, side by side along
    the cut features. task, begun, multiplied: as in `ParameterSpec`. linear: a matrix of it belongs to a module whose
    product can have an adapter and codes. turned: a stack of experts is stored as [E, outputs, inputs]. trained: a loss
    gives it a gradient.
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
    multiplied: float = 1.0
    linear: bool = True
    turned: bool = False
    trained: bool = True

    @property
    def owner(self) -> str:
        """Module that registers it."""
        return self.name.rpartition(".")[0]

    @property
    def is_matrix(self) -> bool:
        """True for a matrix or, for experts, a stack of matrices; a single row or column, biases and norms count as
        vectors."""
        return self.decays and len(self.shape) == (3 if self.expert else 2) and min(self.shape[-2:]) > 1


def parameters(arch: Architecture) -> Iterator[ParameterSpec]:
    """Yield every parameter in the order in which the model registers them.

    Matrices decay; norms and embeddings do not. A tied head is the embedding and is not listed again.
    """
    blocks = {layer: tuple(kind.block.parameters(arch)) for kind in arch.kinds for layer in kind.layers}
    yield ParameterSpec(name=f"{EMBEDDING}.weight", shape=(arch.vocab, arch.dim), decays=False)
    for layer in range(arch.layers):
        yield from (_of_layer(parameter, layer) for parameter in blocks[layer])
    for name, shape in arch.other_ends:
        yield ParameterSpec(name=name, shape=shape, decays=False)
    if not arch.tie_embeddings:
        yield ParameterSpec(name=f"{arch.head_module}.weight", shape=arch.head_shape, decays=True)
    for each in arch.head_adapters():
        yield _spec(each, "")


@lru_cache(maxsize=64)
def widest_task(arch: Architecture) -> str:
    """Return the task whose adapter has the most parameters; empty without tasks."""
    sizes = Counter[str]()
    for tensor in parameters(arch):
        if tensor.adapter:
            sizes[tensor.task] += tensor.size
    return max(sizes, key=sizes.__getitem__, default="")


def buffers(arch: Architecture) -> Iterator[ParameterSpec]:
    """Yield the tensors in a checkpoint that are not parameters."""
    of_layer = {layer: kind.block.buffers(arch) for kind in arch.kinds for layer in kind.layers}
    for layer in range(arch.layers):
        for name, shape in of_layer[layer].items():
            yield ParameterSpec(name=f"layers.{layer}.{name}", shape=tuple(shape), decays=False)


def block_parameters(arch: Architecture, layer: int) -> Iterator[ParameterSpec]:
    """Return the parameters of the block of one layer."""
    return (_of_layer(parameter, layer) for parameter in arch.kind_of(layer).block.parameters(arch))


def _of_layer(parameter: BlockParameter, layer: int) -> ParameterSpec:
    return _spec(parameter, f"layers.{layer}.")


def _spec(parameter: BlockParameter, before: str) -> ParameterSpec:
    """Return the model's parameter for a block's. before: prefix of its name."""
    return ParameterSpec(
        name=f"{before}{parameter.name}",
        shape=parameter.shape,
        decays=parameter.decays,
        expert=parameter.expert,
        trained=parameter.trained,
        adapter=parameter.adapter and f"{before}{parameter.adapter}",
        task=parameter.task,
        begun=parameter.begun,
        multiplied=parameter.multiplied,
    )


def name_in_block(name: str) -> str:
    """Return the name of a block's parameter without its layer; empty for parameters outside blocks."""
    return name.split(".", 2)[2] if name.startswith("layers.") else ""


# Child of a matrix's module that holds the adapters of tasks.
TASKS: Final = "tasks"


def task_in(name: str) -> str:
    """Return the task that owns a parameter of this name; empty if none does."""
    return name.partition(f".{TASKS}.")[2].partition(".")[0]


def expert_module(arch: Architecture) -> str:
    """Return the module of a block that holds the experts' parameters. Raises StopIteration without experts."""
    return next(each.owner for kind in arch.kinds for each in kind.block.parameters(arch) if each.expert)


def expert_widths(arch: Architecture) -> Set[int]:
    """Return all extents of the experts' matrices, including their adapters' matrices."""
    widths = {arch.dim, arch.expert_ffn}
    if arch.adapter is None:
        return widths
    all_parameters = (each for kind in arch.kinds for each in kind.block.parameters(arch))
    return widths | {extent for each in all_parameters if each.expert for extent in each.shape[1:]}


def pairs_within(length: int, window: int | None) -> int:
    """Return the number of (query, key) pairs less than `window` apart in a document of `length` positions, in both
    directions."""
    if window is None or window >= length:
        return length**2
    return length * (2 * window - 1) - window * (window - 1)
