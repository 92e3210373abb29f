"""The shape of a model: every number resolved, and the parameters that follow from it by name and shape.

Shapes: D dim, F ffn, H query heads, K key/value heads, A head width, V vocabulary, E experts.
"""

from collections.abc import Iterator
from typing import Final

from attrs import frozen

EMBEDDING: Final = "embed_tokens"


HEAD: Final = "lm_head"


@frozen(kw_only=True)
class Architecture:
    """A decoder-only transformer with nothing left to choose."""

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

    @property
    def is_moe(self) -> bool:
        return self.experts > 0


@frozen(kw_only=True)
class ParameterSpec:
    """A parameter: its name, its whole shape, and how the optimizer and a token's path treat it."""

    name: str
    shape: tuple[int, ...]
    decays: bool
    expert: bool = False

    @property
    def size(self) -> int:
        product = 1
        for extent in self.shape:
            product *= extent
        return product


def parameters(arch: Architecture) -> Iterator[ParameterSpec]:
    """Every parameter in the order in which the model registers them.

    Matrices decay; norms and embeddings do not. A tied head is the embedding and is not listed again.
    """
    yield ParameterSpec(name="embed_tokens.weight", shape=(arch.vocab, arch.dim), decays=False)
    for layer in range(arch.layers):
        yield from _block(arch, f"layers.{layer}.")
    yield ParameterSpec(name="norm.weight", shape=(arch.dim,), decays=False)
    if not arch.tie_embeddings:
        yield ParameterSpec(name="lm_head.weight", shape=(arch.vocab, arch.dim), decays=True)


def block_parameters(arch: Architecture) -> Iterator[ParameterSpec]:
    """The parameters of one block."""
    yield from _block(arch, "layers.0.")


def _block(arch: Architecture, prefix: str) -> Iterator[ParameterSpec]:
    def norm(name: str, width: int) -> ParameterSpec:
        return ParameterSpec(name=f"{prefix}{name}.weight", shape=(width,), decays=False)

    def matrix(name: str, rows: int, columns: int) -> ParameterSpec:
        return ParameterSpec(name=f"{prefix}{name}.weight", shape=(rows, columns), decays=True)

    def swiglu(name: str, width: int) -> Iterator[ParameterSpec]:
        yield matrix(f"{name}.gate_proj", width, arch.dim)
        yield matrix(f"{name}.up_proj", width, arch.dim)
        yield matrix(f"{name}.down_proj", arch.dim, width)

    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    yield norm("input_layernorm", arch.dim)
    yield matrix("self_attn.q_proj", queries, arch.dim)
    yield matrix("self_attn.k_proj", keys, arch.dim)
    yield matrix("self_attn.v_proj", keys, arch.dim)
    yield matrix("self_attn.o_proj", arch.dim, queries)
    if arch.qk_norm:
        yield norm("self_attn.q_norm", arch.head_dim)
        yield norm("self_attn.k_norm", arch.head_dim)
    yield norm("post_attention_layernorm", arch.dim)
    if arch.is_moe:
        yield matrix("mlp.gate", arch.experts, arch.dim)
        for name, rows, columns in (
            ("gate_proj", arch.dim, arch.expert_ffn),
            ("up_proj", arch.dim, arch.expert_ffn),
            ("down_proj", arch.expert_ffn, arch.dim),
        ):
            # Stacked [E, K, N]: the last dim is the output, so that a grouped product reads them in place.
            yield ParameterSpec(
                name=f"{prefix}mlp.experts.{name}", shape=(arch.experts, rows, columns), decays=True, expert=True
            )
        if arch.shared_experts:
            yield from swiglu("mlp.shared_experts", arch.shared_experts * arch.expert_ffn)
    else:
        yield from swiglu("mlp", arch.ffn)
