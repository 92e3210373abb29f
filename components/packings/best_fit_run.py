"""The rows of `multipack`."""

from .multipack_run import pack

__all__ = ["pack"]
