"""Settings and config keys of families with Mamba-2 mixers."""

from typing import Any, Final

from xtrain.dsl.schema.model import TransformerSettings
from xtrain.dsl.schema.model_config import ConfigKey
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, not_negative, setting
from xtrain.lazy_attrs import frozen

# Keys without effect on what is computed: the chunks of the scan, the format of its states, first values, and how
# kernels run.
MAMBA_HARMLESS: Final = frozenset(
    """chunk_size expand mamba_chunk_size mamba_dt_init_floor mamba_dt_limit mamba_dt_max mamba_expand mamba_proj_bias
    mamba_ssm_cache_dtype rescale_prenorm_residual time_step_floor time_step_limit time_step_max
    use_mamba_kernels""".split()  # noqa: SIM905
)

# Keys of Granite 4 and Falcon-H1.
MAMBA_KEYS: Final = (
    ConfigKey("mamba_groups", "mamba_n_groups", 1),
    ConfigKey("mamba_state", "mamba_d_state", 256),
    ConfigKey("mamba_kernel", "mamba_d_conv", 4),
    ConfigKey("mamba_conv_bias", "mamba_conv_bias", default=True),
    ConfigKey("mamba_bias", "mamba_proj_bias", default=False),
)


@frozen
class Mamba2Settings(TransformerSettings):
    """Settings of every family whose blocks may have a Mamba-2 mixer."""

    mamba_heads: int | Auto = setting(
        "number of heads of a Mamba-2 mixer, each with a state; auto: 2 · heads",
        default=AUTO,
        check=at_least(1),
        resuming="width",
    )
    mamba_head_dim: int | Auto = setting(
        "width of a head of a Mamba-2 mixer; auto: dim / heads", default=AUTO, check=at_least(1), resuming="width"
    )
    mamba_groups: int | Auto = setting(
        "number of groups of heads that share write and read vectors; auto: kv_heads",
        default=AUTO,
        check=at_least(1),
        resuming="width",
    )
    mamba_state: int = setting(
        "width of write and read vectors, and numbers of a state for each number of a head",
        default=128,
        check=at_least(1),
        resuming="width",
    )
    mamba_kernel: int = setting(
        "positions that the causal convolution before a Mamba-2 mixer sees",
        default=4,
        check=at_least(1),
        resuming="shape",
    )
    mamba_conv_bias: bool = setting("biases on that convolution", default=True, resuming="shape")
    mamba_bias: bool = setting("biases on the matrices of Mamba-2 mixers", default=False, resuming="shape")
    mamba_least_step: float = setting(
        "smallest step size of a Mamba-2 mixer", default=0.0, check=not_negative, resuming="meaning"
    )

    def auto(self) -> dict[str, tuple[Any, str]]:
        found, width = super().auto(), max(1, self.dim // self.heads)
        kv_heads = found["kv_heads"][0] if isinstance(self.kv_heads, Auto) else self.kv_heads
        return {
            **found,
            "mamba_heads": (2 * self.heads, f"2 · heads {self.heads}"),
            "mamba_head_dim": (width, f"dim {self.dim} / heads {self.heads}"),
            "mamba_groups": (kv_heads, f"kv_heads {kv_heads}"),
        }

    def unfit(self) -> tuple[str, str, str] | None:
        values, _ = self.resolved()
        groups, heads = values["mamba_groups"], values["mamba_heads"]
        if heads % groups:
            message = f"mamba_heads {heads} is not divisible by mamba_groups {groups}"
            return "mamba_heads", message, f"use a number of heads divisible by {groups}"
        return super().unfit()
