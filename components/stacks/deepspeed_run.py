"""Requirements of DeepSpeed's file I/O on a machine. DeepSpeed compiles it at first use; the check builds nothing."""

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from xtrain.runtime.base.errors import EnvironmentFault

BUILDING: Final = 1800.0  # seconds; an older lock is not of a build in progress
_PINNED: Final = "pin_memory"  # imported before the file I/O extension


def check_machine(device: str, *, files: dict[str, Any] | None = None, **_: Any) -> None:
    """Raise EnvironmentFault (X715) if the ranks' files cannot be read and written. device: `cpu`, `cuda`, or `auto`;
    the other arguments are those of the node `setup.parallel.deepspeed`."""
    if files is None:
        return
    if device == "auto":
        device = "cuda" if import_module("torch").cuda.is_available() else "cpu"
    os.environ["DS_ACCELERATOR"] = device
    check_files()


def check_files() -> None:
    """Raise EnvironmentFault (X715) if DeepSpeed cannot compile its file I/O, or would wait forever for a killed
    compilation."""
    try:
        accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
        built: Any = import_module("deepspeed.git_version_info")
        builder = accelerator.create_op_builder("AsyncIOBuilder")
    except Exception as error:
        message = f"stack deepspeed needs the package deepspeed ({type(error).__name__}: {error}); install it with "
        raise EnvironmentFault("X715", message + "`pip install 'xtrain[deepspeed]'`, or use stack parallel") from error
    ahead = built.installed_ops if built.accelerator_name == accelerator._name else {}
    compiles = [name for name in (builder.name, _PINNED) if not ahead.get(name)]
    if compiles and (lacks := dict(_lacks(builder, compiles, accelerator._name))):
        what, do = " and no ".join(lacks), " and ".join(lacks.values())
        message = f"stack deepspeed offloads to nvme through code that it compiles, and there is no {what} here; {do}"
        raise EnvironmentFault("X715", f"{message}, or offload to cpu")
    for name in compiles:
        _check_lock(name)


def _lacks(builder: Any, compiles: list[str], device: str) -> Iterator[tuple[str, str]]:
    """Yield what a compilation of these extensions lacks, and how to install it."""
    extension: Any = import_module("torch.utils.cpp_extension")
    compiler = shlex.split(extension.get_cxx_compiler())[0]
    if shutil.which(compiler) is None:
        yield f"C++ compiler ({compiler})", "install g++"
    if builder.name in compiles and not builder.is_compatible():
        yield "libaio that a C compiler finds", "install libaio-dev (or libaio-devel) and gcc"
    if not extension.is_ninja_available():
        yield "ninja in PATH", "`pip install ninja` in an environment that is activated"
    if builder.name in compiles and device == "cuda" and extension.CUDA_HOME is None and extension.ROCM_HOME is None:
        yield "CUDA toolkit", "set CUDA_HOME to the CUDA version that torch is built for"


def _check_lock(name: str) -> None:
    extension: Any = import_module("torch.utils.cpp_extension")
    try:
        lock = Path(extension._get_build_directory(name, verbose=False), "lock")
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return
    except OSError as error:
        message = f"DeepSpeed has nowhere to compile {name}: {error.filename}: {error.strerror}"
        raise EnvironmentFault("X715", f"{message}; set TORCH_EXTENSIONS_DIR to a folder that can be written") from None
    if age > BUILDING:
        message = f"DeepSpeed would wait for {lock}, left by an unfinished build of {name}"
        raise EnvironmentFault("X715", f"{message}; remove it and start again")
