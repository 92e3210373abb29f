"""`Local`: what one rank computes with: its tokens, heads and widths, and the bytes of a number."""

from attrs import frozen

from xtrain.dsl.schema.adapters import TaskAdapters
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.planner.architecture import expert_widths
from xtrain.planner.attention_kernels import attention_kernels
from xtrain.planner.costs.op_trace import INDEX
from xtrain.planner.mesh.cluster import device_kind
from xtrain.planner.plan import Hardware
from xtrain.planner.pointwise_kernels import pointwise_kernels
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import BYTES

HOPPER = 9  # the capability of CUDA for which torch has kernels of grouped products
WIDEST_FLASH = 256  # the largest head that flash attention knows


@frozen(kw_only=True)
class Local:
    """One microbatch on one rank.

    tokens: those it holds of the microbatch's rows; between: those of its residual stream, fewer where tensor parallel
    cuts the sequence; routed: those it sends to experts. sequence: positions of a whole row. heads, kv_heads, ffn: its
    share of them; spread_kv: key/value heads as ulysses deals them out, with copies. width, exact: bytes of a number in
    the computation and in what is computed exactly. attention: the kernel of rows that lie on one rank. fused: norms,
    rotations and SwiGLU are one pass each. flash: kernels spare scores of attention. grouped: one kernel
    computes all experts. token_keys: bytes of the numbers of tokens by which inputs are dropped.
    """

    rows: int
    tokens: int
    between: int
    routed: int
    sequence: int
    dim: int
    heads: int
    kv_heads: int
    spread_kv: int
    head_dim: int
    ffn: int
    vocab: int
    width: int
    exact: int
    attention: str
    fused: bool
    flash: bool
    grouped: bool
    token_keys: int

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return self.between * self.dim * self.width

    @property
    def whole(self) -> int:
        """Bytes of activations of all tokens, `dim` wide."""
        return self.tokens * self.dim * self.width

    @property
    def queries(self) -> int:
        return self.tokens * self.heads * self.head_dim * self.width

    @property
    def keys(self) -> int:
        return self.tokens * self.kv_heads * self.head_dim * self.width


def local_of(run: Resolved, cluster: Hardware) -> Local:
    """The sizes on every rank of `run`; those of the rank with the most, where they differ."""
    arch, batch, spec = run.architecture, run.batch, run.spec
    tp, ulysses = run.size("tp"), run.size("ulysses")
    tokens = run.positions
    kv_heads = arch.kv_heads // tp
    device = "cpu" if device_kind(spec) == "cpu" else "cuda"
    compute = run.formats.compute
    exact = max(BYTES[compute], BYTES["fp32"])
    flash = device == "cpu" or (compute == "bf16" and arch.head_dim % 8 == 0 and arch.head_dim <= WIDEST_FLASH)
    return Local(
        rows=batch.micro,
        tokens=tokens,
        between=tokens // tp if spec.parallel.tp.sequence else tokens,
        routed=tokens // tp,
        sequence=batch.sequence,
        dim=arch.dim,
        heads=arch.heads // tp,
        kv_heads=kv_heads,
        spread_kv=kv_heads if kv_heads % ulysses == 0 else ulysses,
        head_dim=arch.head_dim,
        ffn=arch.ffn // tp,
        vocab=-(-arch.vocab // tp),
        width=BYTES[compute],
        exact=exact,
        attention=attention_kernels(run)[device],
        fused=pointwise_kernels(run)[device] == "fused",
        flash=flash,
        grouped=compute == "bf16"
        and _capability(cluster) == HOPPER
        and not any(each % 8 for each in expert_widths(arch))
        and not isinstance(arch.adapter, TaskAdapters),  # experts are then computed one after the other
        token_keys=INDEX * tokens if arch.adapter is not None and arch.adapter.drops else 0,
    )


def _capability(cluster: Hardware) -> int:
    """Of CUDA, its first number; 0 if it is not known."""
    sheet = CLUSTERS[cluster.preset].sheet
    return 0 if sheet is None else sheet.capability
