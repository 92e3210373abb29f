"""Mixers and stored names of families with Mamba-2 mixers."""

from xtrain.blocks.mamba2 import Mamba2Layer
from xtrain.components.families._joined import Rows
from xtrain.plan.architecture import Architecture


def mamba2_layer(name: str, arch: Architecture) -> Mamba2Layer:
    """Return the mixer with the settings of `Mamba2Settings`."""
    own = arch.own
    return Mamba2Layer(
        name=name,
        groups=own["mamba_groups"],
        heads=own["mamba_heads"],
        head_dim=own["mamba_head_dim"],
        state_dim=own["mamba_state"],
        kernel=own["mamba_kernel"],
        least_step=own["mamba_least_step"],
        conv_bias=own["mamba_conv_bias"],
        bias=own["mamba_bias"],
    )


def mamba2_tensors(arch: Architecture) -> dict[str, Rows]:
    """Return the stored tensors of a mixer that have several parameters, with their rows."""
    layer = mamba2_layer("", arch)
    inside = [(name, width) for name, width, _ in layer.convolved()]
    joined = {
        "in_proj": ("proj", [("z", layer.outputs()), *inside, ("dt", layer.heads)]),
        "conv1d": ("conv", inside),
    }
    return {
        f"{tensor}.{kind}": [(f"{name}_{ending}.{kind}", rows) for name, rows in parts]
        for tensor, (ending, parts) in joined.items()
        for kind in ("weight", "bias")
    }
