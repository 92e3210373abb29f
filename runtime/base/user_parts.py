"""Functions of the user, loaded from the module that the plan names if its content is unchanged since planning.

Each process that calls such a function loads the module itself. Errors in the user's code are reported with file and
line.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from attrs import field, frozen

from xtrain import version
from xtrain.dsl.user_parts.files import ModuleMissing, PartModule, find_module, is_file, module_digest, module_files
from xtrain.dsl.values import digest as env_digest
from xtrain.plan.canonical import canonical
from xtrain.plan.data import own_modules
from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import DataError, EnvironmentFault, values_here
from xtrain.runtime.base.part_decorators import MARK, Mark

_PRIVATE = "xtrain_parts"
_LOADING = RLock()  # trackers load their modules in their own threads, and a module runs once
_ROOMS = tuple(path.parent for path in Path(version.__file__).parent.glob("*/__init__.py"))


class PartFailed(DataError):
    """The user's code raised an error or returned something invalid; diagnostic code X512.

    trace: the traceback from the user's own frames on; "" without an exception.
    """

    code = "X512"
    trace = ""


class PartChanged(EnvironmentFault):
    """The user's code differs from the planned code; every rank finds the same."""

    agreed = True

    def __init__(self, message: str) -> None:
        super().__init__("X713", message)


@frozen
class UserPart:
    """One function with its arguments, as a plan names it. Light and picklable: code is loaded where it runs.

    base: the folder of the spec; paths of modules are relative to it.
    """

    kind: str
    module: str
    function: str
    digest: str
    arguments: dict[str, Any] = field(repr=False)
    base: Path

    def load(self) -> Callable[..., Any]:
        """Return the function. Raises PartChanged if it differs from the planned one, PartFailed if its module
        fails."""
        with _LOADING:
            function = getattr(_loaded(self.module, self.digest, self.base), self.function, None)
        mark = getattr(function, MARK, None)
        if not isinstance(mark, Mark) or mark.kind != self.kind or not callable(function):
            raise _changed(f"{self.module} has no {self.kind} called `{self.function}`")
        return function

    def failed(self, message: str) -> "PartFailed":
        """Return the error that the function did something invalid, with its file and line."""
        code = getattr(inspect.unwrap(self.load()), "__code__", None)
        line = None if code is None else code.co_firstlineno
        return PartFailed(f"{self.title} {message}", path=_path(self), line=line)

    @property
    def title(self) -> str:
        """Kind and name for a message: "source `name`"."""
        return f"{self.kind} `{self.function}`"


def part_of(kind: str, options: Mapping[str, Any], base: Path) -> UserPart:
    """Return the part that the arguments of a plan's node name, with the values of environment variables.

    Maps among the arguments get their keys in order, which a plan that was read back may have lost. Raises
    EnvironmentFault for a variable that is not set or whose value changed since planning.
    """
    module, function, digest = (options[name] for name in ("module", "function", "digest"))
    arguments = canonical(options["arguments"])
    if variables := options.get("variables"):
        arguments = _with_values(arguments, variables, f"{kind} `{function}`")
    return UserPart(kind, module, function, digest, arguments, base.absolute())


def _with_values(arguments: dict[str, Any], variables: Mapping[str, str], whose: str) -> dict[str, Any]:
    """Return arguments with the values of environment variables. variables: name → digest of the planned value.

    Raises EnvironmentFault for a variable that is not set or has another value.
    """
    arguments = values_here(arguments, variables)
    if changed := [name for name, planned in variables.items() if env_digest(name, os.environ[name]) != planned]:
        message = f"the environment variable {changed[0]}, an argument of the {whose}, has changed since the"
        raise EnvironmentFault("X713", f"{message} plan was made; plan the spec again")
    return arguments


def spec_folder(spec: str) -> Path:
    """Return the folder that paths of modules are relative to; `spec` is `plan.spec`."""
    return Path(spec).parent


def user_source(options: Mapping[str, Any], base: Path) -> Iterator[str | dict[str, Any]]:
    """Yield the documents of a source of the user: texts, or dicts of named fields.

    options: module, function, digest and arguments, as `setup.data` has them. base: the folder of the spec. Raises
    PartChanged, and PartFailed if the code raises or yields something invalid.
    """
    part = part_of("source", options, base)
    with failures_of(part):
        result = part.load()(**part.arguments)
        if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
            raise part.failed(f"returns {_kind(result)} instead of yielding documents")
        documents = iter(result)
    number = 0
    while True:
        with failures_of(part):
            document = next(documents, _END)
        if document is _END:
            return
        number += 1
        if isinstance(document, str):
            yield document
        elif isinstance(document, Mapping):
            yield dict(document)
        else:
            message = f"gave {_kind(document)} as document {number:,}, not a text or a dict"
            raise part.failed(message)


def parts_to_copy(plan: Plan, directory: Path) -> dict[str, bytes]:
    """Return name in `directory` → content of the user's modules and the modules they import from their folder, so that
    a spec in `directory` finds them.

    Files outside the folder of the spec are left out. Raises PartChanged if one differs from the plan.
    """
    contents: dict[str, bytes] = {}
    base = spec_folder(plan.spec).absolute()
    for name, digest in own_modules(plan).items():
        module = _planned(name, digest, base)
        if not is_file(name) or name.startswith(("/", "..")):
            continue
        for path in module_files(module):
            copy = Path(name).parent / path.relative_to(module.root)
            if not (directory / copy).exists() or not (directory / copy).samefile(path):
                contents[copy.as_posix()] = path.read_bytes()
    return contents


_END = object()


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _path(part: UserPart) -> Path | None:
    try:
        return _near(find_module(part.module, part.base).path)
    except ModuleMissing:
        return None


def _near(path: Path) -> Path:
    """Return a path relative to the working folder if it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _changed(message: str) -> PartChanged:
    return PartChanged(f"{message}\n  Plan the spec again.")


# Loading --------------------------------------------------------------------------------------------------------------


@cache
def _loaded(module: str, digest: str, base: Path) -> ModuleType:
    """Load the module if it has the digest, once per process."""
    planned = _planned(module, digest, base)
    name = _near(planned.path).as_posix()
    with failures_in(planned.path, f"loading {name}"):
        loaded = _import_file(planned) if not planned.name else _import_name(planned)
    path = getattr(loaded, "__file__", None)
    if path is None or not Path(path).samefile(planned.path):
        raise _changed(f"`{module}` is loaded from {path}, not from {name}")
    return loaded


def _planned(module: str, digest: str, base: Path) -> PartModule:
    """Find a module. Raises PartChanged if its digest differs."""
    try:
        part_module = find_module(module, base)
        now = module_digest(part_module)
    except (ModuleMissing, OSError) as error:
        reason = str(error) if isinstance(error, ModuleMissing) else f"cannot read `{module}`: {error.strerror}"
        raise _changed(reason) from error
    if now != digest:
        name = _near(part_module.path).as_posix()
        raise _changed(f"{name}, or a module that it imports, has changed since the plan was made")
    return part_module


def _import_file(module: PartModule) -> ModuleType:
    """Run a file as a module with a unique name; it can import modules of its folder."""
    path = module.path.absolute()
    name = f"{_PRIVATE}_{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that it hides no other module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    return loaded


def _import_name(module: PartModule) -> ModuleType:
    here = os.getcwd()  # noqa: PTH109
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(module.name)


# Failures -------------------------------------------------------------------------------------------------------------


@contextmanager
def failures_of(part: UserPart) -> Iterator[None]:
    """Turn errors of a part's code into PartFailed, with the line of the user's file."""
    with failures_in(_path(part), part.title):
        yield


@contextmanager
def failures_in(path: Path | None, doing: str) -> Iterator[None]:
    """Turn errors of the block into PartFailed. path: the user's file. doing: the current action, in words."""
    try:
        yield
    except (DataError, EnvironmentFault):
        raise
    except (Exception, SystemExit) as error:
        # User code must not end the process with SystemExit; Ctrl-C may.
        file, line = _place(error, path)
        first = _first_cause(error)
        cause = ""
        if first is not error:
            where, at = _place(first, path)
            cause = f", because of {_named(first)}" + (f" ({where}:{at})" if at is not None else "")
        failed = PartFailed(f"{doing}: {_named(error)}{cause}", path=file, line=line)
        failed.trace = _trace(error, path)
        raise failed from None


def _named(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _first_cause(error: BaseException) -> BaseException:
    """Return the first exception of a chain."""
    seen = [error]
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or before in seen:
            return error
        seen.append(before)
        error = before


def _place(error: BaseException, path: Path | None) -> tuple[Path | None, int | None]:
    """Return the innermost line of the user's own files in a traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return _near(Path(error.filename)), error.lineno
    if path is None:
        return None, None
    inside = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename, path)]
    if not inside:
        return path, None
    return _near(Path(inside[-1].filename).absolute()), inside[-1].lineno


def _trace(error: BaseException, path: Path | None) -> str:
    """Return the traceback without the frames of xtrain that led to the user's code."""
    frames = error.__traceback__
    while frames is not None and not (path and _is_own(frames.tb_frame.f_code.co_filename, path)):
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames) if frames else traceback.format_exception_only(error)
    return "".join(lines)


def _is_own(filename: str, path: Path) -> bool:
    """Return True if a file is the user's: in their folder, and neither of a library nor of xtrain."""
    file = Path(filename).absolute()
    library = "site-packages" in file.parts or any(file.is_relative_to(room) for room in _ROOMS)
    return file.is_relative_to(path.absolute().parent) and not library
