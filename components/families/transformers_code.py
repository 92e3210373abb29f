"""`model "folder" { … }` of a type that xtrain has no native family for: transformers' own code computes it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from xtrain.blocks.block import BlockPiece
from xtrain.blocks.code_layer import CodeLayer
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.checking.model_code import describe, read_config
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, FOLDER, ModelEnds, ModelFolder
from xtrain.dsl.schema.setting import AUTO, Auto, Role, at_least, not_negative, setting
from xtrain.dsl.user_parts.bodies import BodyError
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import EMBEDDING, HEAD, Architecture, ParameterSpec
from xtrain.plan.canonical import portable
from xtrain.plan.weight_files import SCORE_WEIGHT, Alternatives, StoredNames, StoredPart
from xtrain.text.units import plural


@frozen(kw_only=True)
class CodeNames(StoredNames):
    """Names in the files of a model that transformers' code computes. parts: parameter or buffer → the keys of
    `StoredPart` of every tensor that it is stored in. head: module of a head that is the embedding, which files lack
    and adapters name."""

    parts: Mapping[str, Sequence[Mapping[str, Any]]]
    head: str
    buffers: tuple[str, ...] = ("",)

    def of(self, parameter: ParameterSpec) -> Alternatives:
        if parameter.name == SCORE_WEIGHT:
            return super().of(parameter)
        if parameter.name not in self.parts:
            return ((StoredPart(f"{self.head}.weight", parameter.shape),),)
        parts = ({name: _tuple(value) for name, value in part.items()} for part in self.parts[parameter.name])
        return (tuple(StoredPart(**part) for part in parts),)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _block(number: int, kind: Mapping[str, Any]) -> CodeLayer:
    """Return the block of a kind of layers; the window of its attention if all of it has one."""
    windows = {op["attention"]["window"] for op in kind["costs"]["float32"] if "attention" in op}
    routed = any(each.get("expert") for each in kind["parameters"])
    return CodeLayer("code", number, windows.pop() if len(windows) == 1 else None, routed)


@FAMILIES.register()
@frozen
class TransformersCode(PlannedModel):
    """`model transformers_code { … }`: a causal language model that transformers' own code computes. A spec writes
    `model "folder" { … }`: the folder's config gives all sizes."""

    family: str = named("transformers_code")
    folder: ModelFolder | None = attrs.field(default=None, kw_only=True, metadata={FOLDER: True})
    dim: int = setting("width of the residual stream", check=at_least(1), example="192", resuming="shape")
    layers: int = setting("number of layers", check=at_least(1), example="4", resuming="shape")
    heads: int = setting("number of query heads", check=at_least(1), example="6", resuming="shape")
    kv_heads: int | Auto = setting(
        "number of key and value heads; auto: as many as heads", default=AUTO, check=at_least(1), resuming="shape"
    )
    vocab: int | Literal["tokenizer"] | Auto = setting(
        "vocabulary size; auto: the folder's", default=AUTO, check=at_least(2), resuming="shape"
    )
    tie_embeddings: bool = setting("the embedding is the output head", default=False, resuming="shape")
    code: Literal["transformers", "remote"] = setting(  # pyright: ignore[reportIncompatibleVariableOverride]
        "whose code computes the model; it may be written for a type that xtrain has a native family for. remote: the "
        "modeling files in the folder, which `plan` and every rank execute",
        default="transformers",
        added=True,
        resuming="meaning",
    )
    weights: Literal["auto", "none"] = setting(
        "initial weights of a run; auto: the weights in the folder; none: random",
        default="auto",
        role=Role.PATH,
        added=True,
    )
    router_aux_loss: float | Auto = setting(
        "weight of the load-balancing loss of routers; auto: `router_aux_loss_coef` of the config · experts a token, "
        "or 0",
        default=AUTO,
        check=not_negative,
        added=True,
        resuming="loss",
    )
    frozen: tuple[str, ...] = setting(
        "frozen modules and parameters, by their names in the plan: `*` is any text inside a part of a name, `**` "
        "any parts, `0-3` the numbers 0 to 3",
        default=(),
        example='["embed_tokens", "layers.0-3"]',
        added=True,
    )

    attention: ClassVar[Literal["auto"]] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    head_dim: ClassVar[Auto] = AUTO  # pyright: ignore[reportIncompatibleVariableOverride]
    ffn: ClassVar[Auto] = AUTO  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def _routed(self) -> dict[str, Any] | None:
        """The experts in the model's description; None without such that xtrain computes."""
        return None if self.folder is None else self._described()["experts"]

    @property
    def experts(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Experts of a layer that xtrain computes; 0 without such layers."""
        return 0 if (routed := self._routed) is None else routed["count"]

    @property
    def loads(self) -> bool:
        """True if its weights come from its folder."""
        return self.folder is not None and self.weights == "auto"

    def auto(self) -> dict[str, tuple[Any, str]]:
        return {"kv_heads": (self.heads, f"as many as heads {self.heads}"), "router_aux_loss": self._aux_loss()}

    def _aux_loss(self) -> tuple[float, str]:
        """Return the weight of the routers' loss that the config asks for, and its reason. The loss of transformers
        counts every expert of a token, and xtrain's is a mean over them."""
        routed = self._routed
        if routed is None or routed["router"] is None:
            return 0.0, "xtrain computes no experts of the model whose router has logits"
        coefficient, chosen = routed["coefficient"], routed["chosen"]
        return coefficient * chosen, f"router_aux_loss_coef {coefficient:g} · {plural(chosen, 'expert')} a token"

    def unfit(self) -> tuple[str, str, str] | None:
        if self.folder is None:
            return "family", "this family takes its sizes from a folder", 'write `model "folder" { }`'
        routed = self._routed
        if not isinstance(self.router_aux_loss, Auto) and self.router_aux_loss and not (routed and routed["router"]):
            return "router_aux_loss", self._aux_loss()[1], "leave it out"
        return None

    def resolved(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, reasons = super().resolved()
        described = {} if self.folder is None else self._described()
        sizes = {name: described.get(name, 1) for name in ("head_dim", "ffn", "init_std")}
        if (routed := self._routed) is not None:
            sizes |= {"experts": routed["count"], "experts_per_token": routed["chosen"], "expert_ffn": routed["width"]}
            value, why = self._aux_loss()
            if isinstance(self.router_aux_loss, Auto) and value:
                sizes["router_aux_loss"], reasons["router_aux_loss"] = value, why
        return {**values, **sizes, "rope_theta": 0.0, "norm_eps": 0.0, "qk_norm": False}, reasons

    def composed(self, arch: Architecture, report: Callable[[BodyError], None]) -> dict[str, Any]:
        if self.folder is None:
            return {}
        return {"code": self._described()}

    def _described(self) -> dict[str, Any]:
        """Return the description of the model, with its config. Without weights, a language model that is part of
        another is a model of its own."""
        assert self.folder is not None
        config, folder = read_config(self.folder), self.folder
        remote = folder.path if self.code == "remote" else ""
        found = describe(config, remote)
        if found["text"] is not None and not self.loads:
            config = found["text"]
            found = describe(config, remote)
        place = {"repo": folder.repo, "revision": folder.revision} if folder.repo else {"folder": portable(folder.path)}
        return {**found, "config": config, **({"remote": place} if remote else {})}

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        kinds: list[dict[str, Any]] = arch.own["code"]["kinds"]
        block_of = {layer: _block(number, kind) for number, kind in enumerate(kinds) for layer in kind["layers"]}
        return tuple(block_of[layer] for layer in range(arch.layers))

    @classmethod
    def ends(cls, arch: Architecture) -> ModelEnds:
        code = arch.own["code"]
        others = ((each["name"], tuple(each["shape"])) for each in code["ends"])
        own = [f"{EMBEDDING}.weight", f"{HEAD}.weight"]  # a head's bias is one of the others
        if not arch.has_logits:
            own.append(f"{HEAD}.bias")
        paths = tuple(f"{path}." for path in code["before"])
        return ModelEnds(
            logit_cap=code["logits"].get("cap"),
            others=tuple((name, shape) for name, shape in others if name not in own),
            before=frozenset(each["name"] for each in code["ends"] if each["name"].startswith(paths)),
        )

    @classmethod
    def names_in_files(cls, arch: Architecture) -> StoredNames | None:
        code = arch.own["code"]
        others, head = frozenset(code["others"]), code.get("tied_head", HEAD)
        names = CodeNames(parts=code["stored"], head=head, others=others, experts=("stacked",))
        if arch.has_logits:
            return names
        unread = [
            each["name"] for name, parts in code["stored"].items() if name.startswith(f"{HEAD}.") for each in parts
        ]
        return attrs.evolve(names, ignored=(*names.ignored, *unread))
