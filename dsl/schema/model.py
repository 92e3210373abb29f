"""Model definition: `model` and its `router`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Final, Literal

import attrs

from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.model_config import MOST_EXPERTS, MOST_FURTHER, MOST_LAYERS, ModelConfig
from xtrain.dsl.schema.rope import Rope
from xtrain.dsl.schema.setting import (
    AUTO,
    Auto,
    Role,
    UsualRange,
    at_least,
    between,
    is_unspoken,
    not_negative,
    positive,
    setting,
    settings_of,
)
from xtrain.lazy_attrs import frozen

FAMILIES: Final = Registry["Model"](
    "model",
    "families",
    key="family",
    contract="xtrain.contracts.models.PlannedModel",
    unlisted="transformers_code",  # of folders whose type has no native family
)
FFN_MULTIPLE: Final = 64
# Metadata key of the attribute that a label fills if it is not a family name.
FOLDER: Final = "folder"

# Effect of another value of a setting on a resume. shape: other parameters, or other shapes. meaning: the same weights
# would compute other results. width: both. loss: the loss uses the new value from now on. stage: so does the model, as
# stages of training change it. elsewhere: the value is an argument of a node with a rule of its own.
Resuming = Literal["shape", "meaning", "width", "loss", "stage", "elsewhere"]


@frozen
class Router:
    """`router { … }` inside `model`: routing of tokens to experts."""

    score: Literal["softmax", "sigmoid"] = setting("how logits become scores", default="softmax", resuming="meaning")
    normalise: bool = setting(
        "normalize the scores of the chosen experts to a sum of 1", default=True, resuming="meaning"
    )
    bias_speed: float = setting(
        "update step of the load-balancing biases (aux-loss-free balancing); 0: no biases",
        default=0.0,
        check=not_negative,
        resuming="elsewhere",
    )
    aux_loss: float = setting("weight of the load-balancing loss", default=1e-3, check=not_negative, resuming="loss")
    z_loss: float = setting(
        "weight of the mean squared log-sum-exp of the router logits", default=0.0, check=not_negative, resuming="loss"
    )


# False in commands that execute no code of a spec's author, such as modeling files in a folder.
EXECUTES: Final = ContextVar("executes", default=True)


@contextmanager
def executing_nothing() -> Iterator[None]:
    """Start no process within the block that would execute code of a spec's author."""
    token = EXECUTES.set(False)
    try:
        yield
    finally:
        EXECUTES.reset(token)


@frozen
class ModelFolder:
    """Folder of a model that the label names. path: relative to the working folder.

    repo, revision: of `hub(…)`, whose folder is a snapshot in the cache of huggingface_hub; revision is the exact
    commit.
    """

    path: str
    repo: str = ""
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.repo} at {self.revision[:12]}" if self.repo else self.path


_SNAPSHOT: Final = re.compile(r'hub\("([A-Za-z0-9][\w./-]*)", revision = "([0-9a-f]{40})"\)')


def snapshot_text(repo: str, commit: str) -> str:
    """Return the text of a snapshot in a spec."""
    return f'hub("{repo}", revision = "{commit}")'


def snapshot_named(text: str) -> tuple[str, str] | None:
    """Return (repository, commit) of a text of `snapshot_text`; None for any other text."""
    found = _SNAPSHOT.fullmatch(text)
    return None if found is None else (found[1], found[2])


@frozen(kw_only=True)
class ModelEnds:
    """Properties of a family's embedding, final norm and head.

    embedding_scale: factor on embeddings, rounded to the compute format; None: no scaling. norm_plus_one: the norm
    before the head multiplies by 1 + weight. norm_scale: factor of that norm's output, and so of logits. logit_cap:
    logits l become cap · tanh(l / cap); None: no cap. others: name and shape of every parameter outside blocks,
    embedding and head; None: the last norm's weight alone. before: their names if they are used before the blocks.
    """

    embedding_scale: float | None = None
    norm_plus_one: bool = False
    norm_scale: float = 1.0
    logit_cap: float | None = None
    others: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    before: frozenset[str] = frozenset()


@FAMILIES.base
class Model(Component):
    """`model FAMILY { … }`: a decoder-only transformer (RMSNorm, RoPE, grouped-query attention, SwiGLU)."""

    family: str
    dim: int
    layers: int
    heads: int
    kv_heads: int | Auto
    head_dim: int | Auto
    ffn: int | Auto
    vocab: int | Literal["tokenizer"] | Auto
    tie_embeddings: bool
    attention: Literal["auto", "documents", "blocks", "flex", "cudnn", "flash3", "flash4", "mask"]
    code: Literal["", "transformers", "remote"] = ""  # whose code computes the model; empty: xtrain's
    experts: int = 0  # for families without experts
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    rope: Rope = Rope()
    mtp: int = 0
    mtp_weight: float = 0.0
    folder: ModelFolder | None = None
    weights: Literal["auto", "none"] = "auto"
    coding: Literal["plain", "mxfp4", "fp8"] = "plain"
    frozen: tuple[str, ...] = ()
    config: ClassVar[ModelConfig | None] = None
    """Supported keys of a `config.json`; None: model folders of this family are unsupported."""
    other: ClassVar[Resuming] = "meaning"
    """Effect of another value of a setting that declares no `resuming`."""

    def auto(self) -> dict[str, tuple[Any, str]]:
        """Return the values of `auto` settings that follow from the model alone, each with its reason."""
        raise NotImplementedError

    def idle(self) -> dict[str, tuple[str, str]]:
        """Return the settings without effect in any run: (reason, what to do)."""
        return {}

    def unfit(self) -> tuple[str, str, str] | None:
        """Return (setting, what is wrong, what to do) for settings that conflict."""
        return None

    def resolved(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the experiment's settings as JSON, with `router_` before the names of `router`'s, and the reasons of
        resolved `auto` values. Settings that do not follow from the model alone are left out."""
        values: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        derived = self.auto()
        for name, (attribute, meta) in settings_of(type(self)).items():
            value = getattr(self, attribute.name)
            if meta.role is not Role.EXPERIMENT or (isinstance(value, Auto) and name not in derived):
                continue
            if name == "frozen":  # does not affect the computation
                continue
            if is_unspoken(attribute, meta, value):
                continue
            if isinstance(value, Auto):
                values[name], reasons[name] = derived[name]
            elif isinstance(value, Rope):
                values[name] = value.resolved()
                if "attention_factor" in values[name] and isinstance(value.attention_factor, Auto):
                    yarn = f"0.1 · ln(factor {value.factor:g}) + 1"
                    longrope = f"√(1 + ln(factor {value.factor:g}) / ln(original {value.original}))"
                    reasons[f"{name}.attention_factor"] = longrope if value.scaling == "longrope" else yarn
            elif isinstance(value, Router):
                values |= {f"{name}_{inner}": getattr(value, inner) for inner in attrs.fields_dict(Router)}
            else:
                values[name] = list(value) if isinstance(value, tuple) else value
        return values, reasons


@frozen
class TransformerSettings(Model):
    """Settings of every family; a family inherits from this class and declares its own settings.

    folder: the folder that defined the settings, if the label is not a family name.
    """

    folder: ModelFolder | None = attrs.field(default=None, kw_only=True, metadata={FOLDER: True})
    dim: int = setting("width of the residual stream", check=at_least(1), example="192", resuming="shape")
    layers: int = setting("number of decoder blocks", check=between(1, MOST_LAYERS), example="4", resuming="shape")
    heads: int = setting("number of query heads", check=at_least(1), example="6", resuming="width")
    kv_heads: int | Auto = setting(
        "number of key and value heads; auto: as many as heads", default=AUTO, check=at_least(1), resuming="width"
    )
    head_dim: int | Auto = setting(
        "width of a head; auto: dim / heads", default=AUTO, check=at_least(2), resuming="width"
    )
    ffn: int | Auto = setting(
        "width of the feed-forward layer; auto: 8/3 dim, rounded up to the next multiple of 64",
        default=AUTO,
        check=at_least(1),
        resuming="shape",
    )
    vocab: int | Literal["tokenizer"] | Auto = setting(
        "vocabulary size; auto: from the tokenizer, or from a model folder's config.json; tokenizer: a model folder "
        "gets a row for every id of the tokenizer, new rows start as the mean of the others",
        default=AUTO,
        check=at_least(2),
        resuming="shape",
    )
    rope_theta: float = setting(
        "base of the RoPE frequencies",
        default=10_000.0,
        check=positive,
        resuming="meaning",
        usual=UsualRange(
            1e4, 1e7, "1e4 (arXiv 2104.09864), Llama 3 5e5 (2407.21783), Qwen2.5-1M 1e7 (2501.15383)", 100
        ),
    )
    rope: Rope = setting(
        "scaling of rotary positions to a longer context", default=Rope(), added=True, resuming="meaning"
    )
    norm_eps: float = setting("epsilon inside RMSNorm", default=1e-6, check=positive, resuming="meaning")
    tie_embeddings: bool = setting("use the embedding as the output head", default=False, resuming="shape")
    qk_norm: bool | Auto = setting(
        "RMSNorm on queries and keys; auto: the family's default", default=AUTO, resuming="shape"
    )
    init_std: float = setting(
        "standard deviation of the initial weights", default=0.02, check=positive, resuming="elsewhere"
    )
    attention: Literal["auto", "documents", "blocks", "flex", "cudnn", "flash3", "flash4", "mask"] = setting(
        "attention kernel for packed documents; blocks: rows of one document 64 queries at a time; cudnn: rows of one "
        "document by cuDNN, others as flex; flash3, flash4: all documents in one call of FlashAttention 3 or 4, a "
        "package of its own; auto: on cpu "
        "blocks for rows of 128 to 512 positions in fp64, and in fp32 unless products use the highest precision, "
        "else documents; on cuda cudnn, in bf16 with heads of at most 128 on a cluster of compute capability 9 or 10, "
        "else flex; for heads of less than 16 documents",
        default="auto",
        role=Role.EXECUTION,
    )
    weights: Literal["auto", "none"] = setting(
        "initial weights of a run; auto: from the model's folder, if it has one; none: random",
        default="auto",
        role=Role.PATH,
        added=True,
    )
    coding: Literal["plain", "mxfp4", "fp8"] = setting(
        "numbers of matrices in the folder's files; mxfp4 and fp8, which have scales of blocks, are dequantized while "
        "they are read",
        default="plain",
        role=Role.PATH,
        added=True,
    )
    frozen: tuple[str, ...] = setting(
        "frozen modules and parameters, by their names in the plan: `*` is any text inside a part of a name, `**` "
        "any parts, `0-3` the numbers 0 to 3",
        default=(),
        example='["embed_tokens", "layers.0-3"]',
        added=True,
    )

    mtp: int = setting(
        "multi-token prediction: modules after the last block, each a block with two norms and a projection, that "
        "predict further tokens in training (arXiv 2412.19437, section 2.2); 0: none",
        default=0,
        check=between(0, MOST_FURTHER),
        added=True,
        resuming="shape",
    )
    mtp_weight: float = setting(
        "weight of the mean of their cross-entropies, added to the cross-entropy of the next token",
        default=0.3,
        check=not_negative,
        added=True,
        resuming="loss",
    )

    has_qk_norm: ClassVar[bool] = False
    """True if the family applies RMSNorm to queries and keys."""

    @property
    def loads(self) -> bool:
        """True if its weights come from its folder."""
        return self.folder is not None and self.weights == "auto"

    def idle(self) -> dict[str, tuple[str, str]]:
        found = {f"rope.{name}": why for name, why in self.rope.idle().items()}
        if self.folder is None:
            found["weights"] = ("the model is not from a folder, so its weights are random", "remove it")
            found["coding"] = ("the model is not from a folder, so it has no files", "remove it")
        elif self.loads:
            found["init_std"] = ("the weights are from the folder", "remove it")
        if not self.mtp:
            found["mtp_weight"] = ("no module predicts further tokens, because `mtp` is 0", "give `mtp`, or remove it")
        elif not self.mtp_weight:
            found["mtp"] = ("its modules have no effect, because `mtp_weight` is 0", "remove both")
        if self.window is None and hasattr(self, "local_theta"):
            found["local_theta"] = ("no block has a window", "give `window`, or remove it")
        if self.full_layers and self.window is None:
            found["full_layers"] = ("no block has a window", "give `window`, or remove it")
        return found

    def unfit(self) -> tuple[str, str, str] | None:
        beyond = [layer for layer in self.full_layers if layer >= self.layers]
        if beyond:
            message = f"there is no block {beyond[0]}: the {self.layers} blocks are 0 to {self.layers - 1}"
            return "full_layers", message, "name existing blocks"
        if self.window is not None and len(set(self.full_layers)) == self.layers:
            return (
                "full_layers",
                "no block has the window",
                "leave at least one block with the window, or remove `window`",
            )
        return None

    def auto(self) -> dict[str, tuple[Any, str]]:
        part = "part" if self.has_qk_norm else "no part"
        return {
            "kv_heads": (self.heads, f"as many as heads {self.heads}"),
            "ffn": (default_ffn(self.dim), f"8/3 · dim {self.dim}, rounded up to a multiple of {FFN_MULTIPLE}"),
            "qk_norm": (self.has_qk_norm, f"{part} of a {self.family} block"),
        }


def attention_biases() -> Any:
    """Declare the setting `attention_bias` of a family."""
    return setting(
        "biases on queries, keys, values and the output of attention", default=False, added=True, resuming="shape"
    )


def mlp_biases() -> Any:
    """Declare the setting `mlp_bias` of a family."""
    return setting("biases on the three matrices of the SwiGLU", default=False, added=True, resuming="shape")


def window_setting() -> Any:
    """Declare the setting `window` of families with sliding-window attention."""
    return setting(
        "positions that a query attends to: the newest of its document, including its own; none: all before it",
        default=None,
        check=at_least(1),
        example="4096",
        added=True,
    )


def full_layers_setting() -> Any:
    """Declare the setting `full_layers` of families that mix blocks with and without a window."""
    return setting(
        "numbers of blocks without the window; the first block is 0",
        default=(),
        check=not_negative,
        added=True,
    )


def default_ffn(dim: int) -> int:
    """Return 8/3 · dim rounded up to a multiple of 64: the three matrices of SwiGLU then have the 8 · dim² parameters
    of a two-matrix layer of width 4 · dim (Shazeer, arXiv 2002.05202)."""
    return -(-8 * dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


@frozen
class ExpertTransformer(TransformerSettings):
    """Settings of every family whose blocks have experts."""

    experts: int = setting(
        "number of routed experts in a block", check=between(2, MOST_EXPERTS), example="8", resuming="shape"
    )
    experts_per_token: int = setting(
        "number of experts that each token is sent to", default=2, check=at_least(1), resuming="meaning"
    )
    expert_ffn: int | Auto = setting(
        "width of one expert; auto: ffn", default=AUTO, check=at_least(1), resuming="shape"
    )
    shared_experts: int = setting(
        "number of shared experts, which process every token; computed as one SwiGLU",
        default=0,
        check=at_least(0),
        resuming="shape",
    )
    router: Router = setting("how tokens choose experts", default=Router())

    has_dense: ClassVar[Any] = False
    """True if some blocks have a SwiGLU of width `ffn` instead of experts."""

    def auto(self) -> dict[str, tuple[Any, str]]:
        found = super().auto()
        ffn = found["ffn"][0] if isinstance(self.ffn, Auto) else self.ffn
        return {**found, "expert_ffn": (ffn, f"ffn {ffn}")}

    def idle(self) -> dict[str, tuple[str, str]]:
        found = super().idle()
        if not isinstance(self.expert_ffn, Auto) and not self.has_dense:
            why = f"every block has experts, and expert_ffn gives their width, {self.expert_ffn:,}"
            found["ffn"] = (why, "remove it")
        if self.router.bias_speed and self.experts_per_token >= self.experts:
            why = "every token is sent to all experts, so biases have no effect on the choice"
            found["router.bias_speed"] = (why, "leave it out, or send tokens to fewer experts")
        return found

    def resolved(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, reasons = super().resolved()
        if (
            not isinstance(self.expert_ffn, Auto) and not self.has_dense
        ):  # no layer has the width `ffn`, whatever was written
            values["ffn"] = default_ffn(self.dim)
            reasons.pop("ffn", None)
        # biases influence the choice of experts: no effect if all are chosen
        if self.experts_per_token >= self.experts:
            values["router_bias_speed"] = 0.0
        return values, reasons


@frozen
class MixedTransformer(ExpertTransformer):
    """Settings of every family in which some blocks may have a SwiGLU instead of experts."""

    expert_every: int = setting(
        "the last one of this many consecutive blocks has experts, the others a SwiGLU of width ffn",
        default=1,
        check=at_least(1),
        added=True,
        resuming="shape",
    )
    dense_layers: tuple[int, ...] = setting(
        "numbers of further blocks that have a SwiGLU of width ffn; the first block is 0",
        default=(),
        check=not_negative,
        added=True,
        resuming="shape",
    )

    @property
    def has_dense(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.expert_every > 1 or bool(self.dense_layers)

    def unfit(self) -> tuple[str, str, str] | None:
        beyond = [layer for layer in self.dense_layers if layer >= self.layers]
        if beyond:
            message = f"there is no block {beyond[0]}: the {self.layers} blocks are 0 to {self.layers - 1}"
            return "dense_layers", message, "name existing blocks"
        if all(layer in self.dense_layers or (layer + 1) % self.expert_every for layer in range(self.layers)):
            name = "expert_every" if self.expert_every > self.layers else "dense_layers"
            return (
                name,
                "no block has experts",
                ("leave at least one block with experts, or use a family without experts"),
            )
        return super().unfit()


def expert_families() -> list[str]:
    """Return the families whose blocks have experts."""
    return [name for name, family in FAMILIES.items() if "experts" in settings_of(family)]
