"""What is trained: `model` and its `router`, `tokenizer`, `precision`."""

from typing import Literal

from attrs import frozen

from .names import file_path
from .setting import AUTO, Auto, Role, at_least, label, not_negative, positive, setting

DENSE = ("llama", "qwen3")
MOE = ("qwen3_moe", "mixtral")
FAMILIES = DENSE + MOE
Family = Literal["llama", "qwen3", "qwen3_moe", "mixtral"]


@frozen
class Router:
    """`router { … }` inside `model`: routing of tokens to experts."""

    score: Literal["softmax", "sigmoid"] = setting("how logits become scores", default="softmax")
    normalise: bool = setting("normalise the scores of the chosen experts to a sum of 1", default=True)
    bias_speed: float = setting(
        "update step of the load-balancing biases (aux-loss-free balancing); 0: no biases",
        default=0.0,
        check=not_negative,
    )
    aux_loss: float = setting("weight of the load-balancing loss", default=1e-3, check=not_negative)
    z_loss: float = setting(
        "weight of the mean squared log-sum-exp of the router logits", default=0.0, check=not_negative
    )


@frozen
class Model:
    """`model FAMILY { … }`: a decoder-only transformer (RMSNorm, RoPE, grouped-query attention, SwiGLU)."""

    family: Family
    dim: int = setting("width of the residual stream", check=at_least(1), example="192")
    layers: int = setting("number of decoder blocks", check=at_least(1), example="4")
    heads: int = setting("number of query heads", check=at_least(1), example="6")
    kv_heads: int | Auto = setting(
        "number of key and value heads; auto: as many as heads", default=AUTO, check=at_least(1)
    )
    head_dim: int | Auto = setting("width of a head; auto: dim / heads", default=AUTO, check=at_least(2))
    ffn: int | Auto = setting(
        "width of the feed-forward layer; auto: 8/3 dim rounded up to a multiple of 64", default=AUTO, check=at_least(1)
    )
    vocab: int | Auto = setting("vocabulary size; auto: that of the tokenizer", default=AUTO, check=at_least(2))
    rope_theta: float = setting("base of the RoPE frequencies", default=10_000.0, check=positive)
    norm_eps: float = setting("epsilon inside RMSNorm", default=1e-6, check=positive)
    tie_embeddings: bool = setting("use the embedding as the output head", default=False)
    qk_norm: bool | Auto = setting("RMSNorm on queries and keys; auto: on for qwen3 families", default=AUTO)
    init_std: float = setting("standard deviation of the initial weights", default=0.02, check=positive)
    attention: Literal["auto", "documents", "flex", "mask"] = setting(
        "attention kernel for packed documents; auto: documents on cpu, flex on cuda",
        default="auto",
        role=Role.EXECUTION,
    )
    experts: int = setting(
        "number of routed experts in a block", default=0, check=at_least(2), only=MOE, required_by=MOE, example="8"
    )
    experts_per_token: int = setting("experts each token is sent to", default=2, check=at_least(1), only=MOE)
    expert_ffn: int | Auto = setting("width of one expert; auto: ffn", default=AUTO, check=at_least(1), only=MOE)
    shared_experts: int = setting(
        "experts that every token is sent to, computed as one SwiGLU", default=0, check=at_least(0), only=MOE
    )
    router: Router = setting("how tokens choose experts", default=Router(), only=MOE)


@frozen
class Tokenizer:
    """`tokenizer bytes` or `tokenizer "folder"`: turns text into token ids."""

    source: str = label(check=file_path)


@frozen
class Precision:
    """`precision { … }`: number formats."""

    params: Literal["fp32", "fp64", "bf16"] = setting("format of parameters and optimizer state", default="fp32")
    compute: Literal["auto", "fp32", "fp64", "bf16"] = setting(
        "format of forward and backward; auto: that of the parameters", default="auto"
    )
    matmul: Literal["auto", "highest", "high", "medium"] = setting(
        "fp32 matmul precision; auto: the fastest setting that keeps fp32 accuracy in a test on the device",
        default="auto",
        role=Role.EXECUTION,
    )
