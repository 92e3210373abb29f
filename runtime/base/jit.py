"""Compilation of functions with numba, cached for each user, machine type and content of the function.

Importing this module imports numba, which takes about 0.3 s: import modules with kernels only inside the functions
that call them.
"""

import os
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import CodeType
from typing import Any, Final
from uuid import uuid4

import numba
import numpy as np
from numba.core import config as _config
from numba.core.caching import FunctionCache, NullCache

# numba sets the attributes of its configuration on import, where type checkers do not see them.
config: Any = _config
# Release the GIL, and do not check integer divisions for zero: the check costs more than the division.
OPTIONS: Final = {"nogil": True, "error_model": "numpy"}


def kernel(
    function: Callable[..., Any], fastmath: Set[str] = frozenset(), inlined: Sequence[Callable[..., Any]] = ()
) -> Any:
    """Compile `function` on its first call; the compiled code releases the GIL.

    fastmath: LLVM flags that permit reordered sums and fused multiply-adds. inlined: functions that are compiled into
    it although its source does not name them.

    Machine code is kept in the user's cache folder, or in NUMBA_CACHE_DIR, in a folder named after a digest of the
    function, of the numbers it takes from its module, and of the kernels that it calls in any module. Any number of
    processes may share it. What cannot be read there is compiled, and what cannot be written is not kept.
    """
    compiled: Any = numba.njit(**OPTIONS, fastmath=set(fastmath))(function)
    compiled._cache = _CachedKernel(function, fastmath, inlined)
    return compiled


class _CachedKernel(NullCache):
    """numba's cache of one function, opened on first use; its faults never stop a run."""

    def __init__(self, function: Callable[..., Any], fastmath: Set[str], inlined: Sequence[Callable[..., Any]]):
        self.function, self.fastmath, self.inlined = function, fastmath, inlined

    @property
    def digest(self) -> str:
        """Digest of everything that determines the machine code."""
        digest = blake2b(f"{OPTIONS!r} {sorted(self.fastmath)}".encode(), digest_size=10)
        for function in (self.function, *self.inlined):
            _add(digest, function.__code__, function.__globals__)
        return digest.hexdigest()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._files and self._files.load_overload(sig, target_context)
        except Exception:  # cut off or damaged: unpickling and linking fail in many ways
            with suppress(OSError):
                self._files.flush()
            return None

    def save_overload(self, sig: Any, cres: Any) -> None:
        with suppress(OSError):  # a full disk or quota
            if self._files:
                self._files.save_overload(sig, cres)

    @cached_property
    def _files(self) -> Any:
        folder = _cache_folder()
        if folder is None:
            return None
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder / self.digest)
        try:
            files: Any = FunctionCache(self.function)
        except (OSError, RuntimeError):  # no writable folder
            return None
        finally:
            config.CACHE_DIR = before
        # Two processes may compile for different types at once and take the same next number. Unique file names keep
        # each index pointing to its own code.
        file = files._cache_file
        file._data_name_pattern = file._data_name_pattern.replace("{number:d}", "{number:d}-" + uuid4().hex[:8])
        return files


def _cache_folder() -> Path | None:
    if config.CACHE_DIR:
        return Path(config.CACHE_DIR)
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return Path(home) / "xtrain" / "numba"


def _add(digest: Any, code: CodeType, names: dict[str, Any]) -> None:
    """Add the code to the digest, and the values that it takes from its module."""
    digest.update(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add(digest, constant, names)
        else:
            digest.update(f"{constant!r} {type(constant)} ".encode())
    for name in code.co_names:
        value = names.get(name)
        digest.update(f"{name} {type(value)} ".encode())
        if isinstance(value, int | float | np.generic):
            digest.update(repr(value).encode())
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
        elif isinstance(cached := getattr(value, "_cache", None), _CachedKernel):
            digest.update(cached.digest.encode())
