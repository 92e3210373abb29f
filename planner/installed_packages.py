"""Which packages are here, asked without importing them."""

from importlib.util import find_spec
from typing import Final

OF_SERVER: Final = ("starlette", "uvicorn")


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    found = find_spec(package)
    # A mere folder of that name, as W&B leaves one where it runs, would pass for a package without content.
    return found is not None and found.origin is not None


def missing_for_server() -> str | None:
    """Return a message with the packages that the server needs and that are not installed; None if all are here."""
    missing = [name for name in OF_SERVER if find_spec(name) is None]
    return f"the server needs {' and '.join(missing)}: pip install 'xtrain[serve]'" if missing else None
