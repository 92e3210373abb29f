"""Settings and config keys that several families share: experts in groups, rotated shares of heads, windows by type of
layer."""

from collections.abc import Mapping
from typing import Any, Final

from xtrain.dsl.schema.model import ExpertTransformer, Router, TransformerSettings
from xtrain.dsl.schema.model_config import PARTIAL, Config, ConfigKey, Only, WrongKey
from xtrain.dsl.schema.setting import Auto, at_least, positive, setting
from xtrain.lazy_attrs import frozen

WINDOWED: Final = "sliding_attention"
FULL: Final = "full_attention"


def write_window(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the key of the window, if there is one."""
    return {} if settings.get("window") is None else {"sliding_window": settings["window"]}


def write_window_types(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the type of every layer, with and without the window."""
    full = settings.get("full_layers", ()) if settings.get("window") is not None else range(settings["layers"])
    return {"layer_types": [FULL if layer in full else WINDOWED for layer in range(settings["layers"])]}


def local_theta_setting(default: float) -> Any:
    """Declare the setting `local_theta` of families whose blocks with a window have other rotary positions."""
    return setting(
        "base of the RoPE frequencies of blocks with a window, which are not scaled",
        default=default,
        check=positive,
        resuming="meaning",
    )


def rotary_share_setting(default: float) -> Any:
    """Declare the setting `rotary_share` of families that rotate a part of each head."""
    return setting(
        "share of the numbers of a head that rotary positions turn", default=default, check=positive, resuming="meaning"
    )


def rotary_share_key(default: float) -> ConfigKey:
    """Return the key of `rotary_share`, which version 5 of transformers has in `rope_parameters`. default: the share if
    no key gives it."""

    def share(config: Config) -> Any:
        objects = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
        inside = [each.get(PARTIAL) for each in objects if isinstance(each, Mapping)]
        first, *others = [each for each in (*inside, config.get(PARTIAL)) if each is not None] or [default]
        number = isinstance(first, int | float) and not isinstance(first, bool) and 0 < first <= 1
        return float(first) if number and all(each == first for each in others) else _WRONG

    return ConfigKey("rotary_share", PARTIAL, computed=share, writes=lambda values: {PARTIAL: values["rotary_share"]})


_WRONG: Final = WrongKey(PARTIAL, "one number above 0 and at most 1")


def rotary_width(head_dim: int, share: float) -> int:
    """Return how many numbers of a head rotary positions turn, an even number; `unfit_share` refuses shares of an odd
    number."""
    return max(1, int(head_dim * share) // 2) * 2


def unfit_share(model: TransformerSettings, share: float) -> tuple[str, str, str] | None:
    """Return (setting, what is wrong, what to do) if the share does not fit the heads of a model."""
    head_dim = model.dim // model.heads if isinstance(model.head_dim, Auto) else model.head_dim
    width = int(head_dim * share)
    if share <= 1 and width >= 2 and width % 2 == 0:
        return None
    message = f"rotary_share {share:g} of head_dim {head_dim} is {width} numbers, and pairs of a head are rotated"
    return "rotary_share", message, "use a share that gives an even number, at most head_dim"


# Keys of experts in groups, as DeepSeek-V3 has them, and the keys of their auxiliary losses in training, whose weight
# here is `router { aux_loss }`.
GROUPED_ONLY: Final = {
    "moe_layer_freq": Only((1,)),
    "scoring_func": Only(("sigmoid",)),
    "topk_method": Only(("noaux_tc",)),
}
AUXILIARY: Final = frozenset(("aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef"))


@frozen
class GroupedExperts(ExpertTransformer):
    """Settings of every family with shared experts and experts in groups, chosen with biases."""

    shared_experts: int = setting(
        "number of shared experts, which process every token; computed as one SwiGLU", default=1, check=at_least(1)
    )
    expert_groups: int = setting(
        "number of groups that experts are divided into", default=1, check=at_least(1), resuming="meaning"
    )
    groups_per_token: int = setting(
        "number of groups that a token is sent to: the groups with the highest sum of their two best scores",
        default=1,
        check=at_least(1),
        resuming="meaning",
    )
    expert_scale: float = setting(
        "factor of the weights of routed experts", default=1.0, check=positive, resuming="meaning"
    )
    router: Router = setting("how tokens choose experts", default=Router(score="sigmoid"))

    def unfit(self) -> tuple[str, str, str] | None:
        each, rest = divmod(self.experts, self.expert_groups)
        if rest or each < 2:
            message = f"experts {self.experts} cannot be divided into {self.expert_groups} groups of two or more"
            return "expert_groups", message, "use a number of groups that divides the experts"
        if self.groups_per_token > self.expert_groups:
            message = f"groups_per_token {self.groups_per_token} exceeds expert_groups {self.expert_groups}"
            return "groups_per_token", message, f"use {self.expert_groups} or fewer"
        if self.groups_per_token * each < self.experts_per_token:
            message = (
                f"{self.groups_per_token} groups have {self.groups_per_token * each} experts, and a token is sent "
            )
            return "groups_per_token", f"{message}to {self.experts_per_token}", "increase groups_per_token"
        return super().unfit()


@frozen
class GroupedExpertTransformer(GroupedExperts):
    """Settings of families with such experts whose first blocks may have a SwiGLU instead."""

    first_dense: int = setting(
        "number of first blocks with a SwiGLU of width ffn instead of experts",
        default=0,
        check=at_least(0),
        resuming="shape",
    )

    @property
    def has_dense(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.first_dense > 0

    def unfit(self) -> tuple[str, str, str] | None:
        if self.first_dense >= self.layers:
            message = f"all {self.layers} blocks have a SwiGLU, and none has experts"
            return "first_dense", message, "use experts in at least one block, or a family without experts"
        return super().unfit()
