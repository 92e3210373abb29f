"""Which packages are here, asked without importing them."""

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    found = find_spec(package)
    # A mere folder of that name, as W&B leaves one where it runs, would pass for a package without content.
    return found is not None and found.origin is not None
