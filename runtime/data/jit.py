"""`kernel`: compiles a function with numba, once for each user, machine type and source text.

Importing this module imports numba, which takes about 0.3 s: modules of kernels are imported where they are called.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config as _config

# Its settings are made when it is imported.
config: Any = _config


def _cache_folder() -> str:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(home) / "xtrain" / "numba")


def kernel(function: Callable[..., Any]) -> Any:
    """`function`, compiled on its first call; it lets other threads run meanwhile.

    Machine code is kept in the user's cache folder, or where NUMBA_CACHE_DIR says; without a folder that can be written
    to, every process compiles anew.
    A kernel calls kernels of its own file only: numba compiles anew when that file has changed, and looks at no other.
    """
    before = config.CACHE_DIR
    config.CACHE_DIR = before or _cache_folder()
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder for its cache
        return numba.njit(nogil=True)(function)
    finally:
        config.CACHE_DIR = before
