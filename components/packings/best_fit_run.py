"""The rows of `multipack`."""

from xtrain.components.packings.multipack_run import pack

__all__ = ["pack"]
