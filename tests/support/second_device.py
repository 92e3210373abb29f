"""A device besides the CPU on a machine that has none: its tensors lie in the memory of the host, but an operator that
is given tensors of both, or code that reads their memory as if it were the CPU's, fails as on a GPU.

`register()` makes torch know it, once in a process, as `torch.device(NAME)`.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME: Final = "second"
ATEN = torch.ops.aten
# Take tensors of both devices.
BETWEEN = (ATEN.copy_.default, ATEN._copy_from.default, ATEN._copy_from_and_resize.default)

_HELD: dict[int, tuple[Any, Tensor]] = {}  # by address of a storage: the numbers, as bytes


def register() -> torch.device:
    """The device; registered where it is not yet."""
    if not _LIBRARIES:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        library = torch.library.Library("_", "IMPL")
        library.fallback(_fallback, "PrivateUse1")
        copies = torch.library.Library("aten", "IMPL")
        copies.impl("_to_copy", _to_copy, "PrivateUse1")
        _LIBRARIES.extend((library, copies))
        _replace()
    return torch.device(NAME, 0)


def _replace() -> None:
    """What torch has no place for in such a device: its storages, as far as they are asked, and generators."""
    storage: Any = torch.UntypedStorage
    generator: Any = torch.Generator

    def of_ours(name: str, own: Callable[..., Any]) -> None:
        theirs = getattr(storage, name)

        def call(each: Any, *args: Any, **how: Any) -> Any:
            ours = any(isinstance(one, storage) and one.device.type == NAME for one in (each, *args))
            return own(each, *args) if ours else theirs(each, *args, **how)

        setattr(storage, name, call)

    def copied(target: Any, source: Any, *_: Any) -> Any:
        _bytes(target).copy_(_bytes(source))
        return target

    of_ours("resize_", lambda each, size: each)  # FSDP gives back what it has gathered
    of_ours("nbytes", lambda each: _bytes(each).numel())
    of_ours("size", lambda each: _bytes(each).numel())
    of_ours("copy_", copied)

    class Generator(generator):
        def __new__(cls, device: torch.device | str = "cpu") -> torch.Generator:
            return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)

    torch.Generator = Generator  # pyright: ignore[reportAttributeAccessIssue]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    held = _HELD[storage._cdata][1].untyped_storage() if storage.device.type == NAME else storage
    return torch.empty(0, dtype=torch.uint8).set_(held)


class _Nothing:
    """A stream, or an event: all has been done already."""

    def __init__(self, *args: Any, **how: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **how: None


class _Module(_DummyBackendModule):
    """`torch.second`."""

    Stream = Event = _Nothing

    def current_stream(self, device: Any = None) -> _Nothing:
        return _Nothing()

    def stream(self, stream: _Nothing) -> Any:
        return nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


_LIBRARIES: list[torch.library.Library] = []


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    given, tree = pytree.tree_flatten((args, kwargs))
    theirs: dict[int, Tensor] = {}  # by address of the storage of numbers: a tensor of the device with it
    same: dict[int, Tensor] = {}
    mine: list[tuple[Tensor, Tensor]] = []
    seen = []
    for value in given:
        if isinstance(value, Tensor):
            if value.device.type == NAME:
                inner = _numbers(value)
                theirs[inner.untyped_storage()._cdata] = same[id(inner)] = value
                mine.append((value, inner))
                value = inner
            elif value.dim() and op not in BETWEEN:
                raise RuntimeError(f"{op} is given tensors on {NAME} and on {value.device}")
        elif isinstance(value, torch.device):
            value = torch.device("cpu")
        seen.append(value)
    inner_args, inner_kwargs = pytree.tree_unflatten(seen, tree)
    if op in BETWEEN and op is not ATEN.copy_.default:
        source, target, *_ = inner_args
        target.copy_(source)
        return args[1]
    kinds = zip(op._schema.arguments, inner_args, strict=False)
    inner_args = [  # a number in the place of a tensor has been one
        torch.tensor(value) if isinstance(value, int | float) and str(each.type) == "Tensor" else value
        for each, value in kinds
    ]
    out = op(*inner_args, **inner_kwargs)
    for outer, inner in mine:
        if outer.shape != inner.shape or outer.stride() != inner.stride():  # an output that has got its size
            ATEN.set_.source_Storage_storage_offset._op_dk(
                DispatchKey.Meta, outer, outer.untyped_storage(), inner.storage_offset(), inner.shape, inner.stride()
            )
    return pytree.tree_map_only(Tensor, lambda each: same[id(each)] if id(each) in same else _outer(each, theirs), out)


def _to_copy(tensor: Tensor, *, device: torch.device | None = None, **how: Any) -> Tensor:
    """torch would pin what it copies to the host without waiting."""
    own = device is None or device.type == NAME
    given = _numbers(tensor) if tensor.device.type == NAME else tensor
    inner = ATEN._to_copy.default(given, **{**how, "non_blocking": False})
    return _outer(inner, {}) if own else inner


def _numbers(tensor: Tensor) -> Tensor:
    """What is in a tensor of the device, as one of the CPU in the same memory."""
    _, held = _HELD[tensor.untyped_storage()._cdata]
    whole = torch.empty(0, dtype=tensor.dtype)
    return whole.set_(held.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _outer(inner: Tensor, known: dict[int, Tensor]) -> Tensor:
    storage = inner.untyped_storage()
    whole = known.get(storage._cdata)
    if whole is None or whole.dtype != inner.dtype:
        acc: Any = torch._C._acc  # pyright: ignore[reportAttributeAccessIssue]
        whole = acc.create_empty_tensor((1,), inner.dtype)
        own = whole.untyped_storage()
        address = own._cdata
        _HELD[address] = weakref.ref(own, lambda _: _HELD.pop(address)), torch.empty(0, dtype=torch.uint8).set_(storage)
    return ATEN.as_strided.default._op_dk(
        DispatchKey.Meta, whole, list(inner.shape), list(inner.stride()), inner.storage_offset()
    )
