"""Components: parts of a spec chosen by name, each a registered class in a file of its own.

`optimizer adamw { … }` is an object of the class registered as `adamw` among the optimizers; `text("*.txt")` is an
object of the class registered as `text` among the sources, with its settings as arguments. The base class of a kind
defines the interface, and stands for the block while no component is chosen.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeGuard, TypeVar, get_args, get_origin

import attrs

from xtrain.dsl.schema.setting import Range, Setting, complete
from xtrain.dsl.values import HiddenText, digests_in
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

C = TypeVar("C", bound="Component")
PACKAGE: Final = f"{__name__.partition('.dsl.')[0]}.components"
ENTRY_POINTS: Final = "xtrain.components"
# Module in a component folder with the base class of user functions.
_USER: Final = "user_part"


# Default of a parameter that only running the file would compute.
COMPUTED: Final = object()


@frozen
class Offer:
    """Name and provider of a component. word: name of the component's kind. package: `xtrain`, or the installed package
    that offers it."""

    word: str
    name: str
    package: str


class Component:
    """Base class of all components.

    kind: the name by which a spec chooses the component; for model families the attribute is called `family`. A class
    declares it with `named` next to its settings. It is a class variable if no label fills it, as in a call, or if the
    label has another meaning, as in `eval DATASET`.
    """

    components: ClassVar["Registry[Any]"]
    offer: ClassVar[Offer | None] = None
    """None for a base class and for a user function."""
    hands_on: ClassVar[bool] = False
    """Texts of its settings are passed on unread to a command, a service or user code: values of `env` in them are
    hidden."""
    kind: str

    @classmethod
    def torch_module(cls) -> str:
        """Return the name of the module that ranks import for it: `…_torch`, next to its own."""
        return f"{cls.__module__}_torch"

    @classmethod
    def run_module(cls) -> str:
        """Return the name of the torch-free module that runs it in any process: `…_run`, next to its own."""
        return f"{cls.__module__}_run"


class UserComponent(Component):
    """A component that is a user function from a module that `use` names; each function has a class of its own.

    declared: arguments of the decorator. purpose: first line of the docstring. filled: names of the parameters that the
    run fills. The other parameters are the settings, each with `_` appended to its name.
    """

    hands_on = True
    module: ClassVar[str] = ""
    function: ClassVar[str] = ""
    digest: ClassVar[str] = ""
    declared: ClassVar[Mapping[str, Any]] = {}
    filled: ClassVar[tuple[str, ...]] = ()
    purpose: ClassVar[str] = ""
    goes_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Choice of a spec → the kinds that the function works with."""
    declaration: ClassVar[Any] = None
    """The `Declared` read from the source."""

    @classmethod
    def base_of(cls, declared: Any) -> type:
        """Return the base class for the class of a declared function."""
        return cls

    def given(self) -> dict[str, Any]:
        """Return the arguments of the function by name, in the order of its parameters, without defaults that only
        running the file would compute."""
        values = {name: getattr(self, a.name) for name, a in parameters_of(type(self)).items()}
        return {name: value for name, value in values.items() if value is not COMPUTED}

    def call(self) -> dict[str, Any]:
        """Return what the run calls and with which arguments, as JSON: the argument `user` of its node.

        variables: name → digest of the environment variables in the arguments, if there are any.
        """
        variables = digests_in(self.given())
        return {"module": self.module, "function": self.function, "digest": self.digest,
                "arguments": _plain(self.given()), **({"variables": variables} if variables else {})}  # fmt: skip

    def identified(self) -> list[Any]:
        """Return what identifies the function, wherever its file is, as JSON."""
        variables = digests_in(self.given())
        return [self.digest, self.function, _plain(self.given()), *([variables] if variables else [])]


def parameter(name: str, kind: Any, default: Any, check: Range | None = None, doc: str = "") -> Any:
    """Return a parameter of a user function as an attribute, which may have any name."""
    meta = Setting(doc=doc or "argument of your function", check=check, example="…")
    return attrs.field(
        default=default, type=kind, kw_only=True, alias=f"{name}_", metadata={"setting": meta, "parameter": True}
    )


def parameters_of(component: type[UserComponent]) -> dict[str, attrs.Attribute]:
    """Return the parameters of a user function by name, as attributes of its component."""
    return {a.name[:-1]: a for a in attrs.fields(component) if is_parameter(a)}


def is_parameter(attribute: attrs.Attribute) -> bool:
    """Return True if a setting is a parameter of a user function."""
    return "parameter" in attribute.metadata


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, HiddenText) else value


def named(name: str) -> Any:
    """Declare `kind` (or the registry's `key`) with the name by which a spec chooses the component."""
    return attrs.field(default=name, metadata={"named": name})


@frozen
class _Named:
    kind: str = named("")


class Registry(Generic[C], Mapping[str, type[C]]):
    """Name → class of the components of one kind; a component is loaded on first access.

    word: keyword of the block or call. folder: xtrain's own components, one file each, named after the component.
    Installed packages offer others through entry points of the group `xtrain.components`: modules that register what
    they define. User functions are known only to the spec that uses them and are not registered. `DEFAULT` of the
    folder names the component of a spec without the block, which also replaces an invalid call; without `DEFAULT` it is
    the first component. key: the attribute with the name of a component. call: the form of a call without arguments;
    empty for blocks. op: see `of_ops`. contract: full name of the class that every component must subclass; a package
    whose component does not is in `faults`. unlisted: a component that no label names. order: sort key of the
    components; the default is the default component first, then by name.
    """

    _offers: ClassVar[str] = "xtrain"
    """Package whose module is being loaded."""
    asked: ClassVar[bool] = False
    """True while the modules offered by installed packages are being loaded, and afterwards."""
    faults: ClassVar[dict[str, str]] = {}
    """Installed package whose components cannot be loaded → reason."""
    of_calls: ClassVar[dict[str, "Registry[Any]"]] = {}
    """Word → registry of components chosen by calls."""
    of_ops: ClassVar[dict[str, "Registry[Any]"]] = {}
    """Op of a node → registry of the components that each have the op as `<op>.<kind>`."""

    def __init__(
        self,
        word: str,
        folder: str,
        key: str = "kind",
        *,
        call: str = "",
        op: str = "",
        contract: str = "",
        unlisted: str = "",
        order: Callable[[type[C]], Any] | None = None,
    ) -> None:
        self.word, self.folder, self.key, self.call, self._order = word, folder, key, call, order
        self.contract, self.unlisted = contract, unlisted
        self._own: dict[str, type[C]] = {}
        self._user: type[C] | None = None
        if call:
            Registry.of_calls[word] = self
        if op:
            Registry.of_ops[op] = self
        self._settings: tuple[Any, Mapping[str, tuple[attrs.Attribute, Setting]]] | None = None

    def base(self, block: type[C]) -> type[C]:
        """Register the base class of the kind (decorator)."""
        block.components = self
        return block

    def register(self) -> Callable[[type[C]], type[C]]:
        """Return a decorator that registers a component."""

        def add(component: type[C]) -> type[C]:
            name = self._name_of(component)
            known = self._own.get(name)
            assert known is None or known.__module__ == component.__module__, f"{self.word} {name} is defined twice"
            ours = component.__module__.startswith(f"{PACKAGE}.")
            assert ours or name not in self._files, f"{self.word} {name} is defined twice"
            self._check_contract(component)
            self._own[name] = component
            component.offer = Offer(self.word, name, "xtrain" if ours else Registry._offers)
            return component

        return add

    def _name_of(self, component: type[C]) -> str:
        """Return the name that a class declares, without its fields, which would build it."""
        own = vars(component).get(self.key)
        own = getattr(own, "metadata", {}).get("named", own)
        name = own if isinstance(own, str) else attrs.fields_dict(component)[self.key].default
        assert isinstance(name, str)
        return name

    def _check_contract(self, component: type[C]) -> None:
        """Raise TypeError for a component that lacks the methods which planning calls."""
        module, _, name = self.contract.rpartition(".")
        names = {(base.__module__, base.__name__) for base in component.__mro__}
        if self.contract and (module, name) not in names:
            raise TypeError(f"{component.__name__} does not subclass {name}; import it from {module}")

    def user(self, component: type[C]) -> type[C]:
        """Register the base class of user functions, a `UserComponent` (decorator)."""
        self._user = component
        return component

    @cached_property
    def takes_functions(self) -> bool:
        """True if a user function can be a component of this kind."""
        return find_spec(f"{PACKAGE}.{self.folder}.{_USER}") is not None

    @property
    def of_users(self) -> type[C]:
        """Base class of user functions."""
        assert self.takes_functions, f"no {self.word} can be a function of the user's own"
        self._import(_USER)
        assert self._user is not None
        return self._user

    def of(self, args: Mapping[str, Any]) -> type[C]:
        """Return the component that the arguments of a node describe."""
        return self.of_users if "user" in args else self[args["kind"]]

    @property
    def default(self) -> type[C]:
        """Component of a spec that names none; the first one if the block is required."""
        return self[self._default or next(iter(self))]

    def of_kind(self, kind: str) -> type[C] | None:
        """Return the component with a kind used in plans, including the user-function class of components chosen by
        calls."""
        if kind in self:
            return self[kind]
        return self.of_users if self.takes_functions and self.of_users.kind == kind else None

    def form(self, name: str) -> str:
        """Return a call of a component without arguments."""
        return self.call.format(name)

    def origin(self, name: str) -> str:
        """Return the provider of a component: `xtrain` or an installed package."""
        offer = self[name].offer
        assert offer is not None
        return offer.package

    def __getitem__(self, name: str) -> type[C]:
        if name not in self._own:
            if name in self._files:
                self._import(name)
            else:
                load_offered()
        return self._own[name]

    def __contains__(self, name: object) -> bool:
        if name in self._own or name in self._files:
            return True
        load_offered()
        return name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        """Return the names of all components, in schema order."""
        load_offered()
        names = {*self._files, *self._own} - {self.unlisted}
        order = self._order
        return sorted(names, key=lambda name: (order and order(self[name]), name != self._default, name))

    @cached_property
    def _default(self) -> str:
        return getattr(self._package, "DEFAULT", "")

    def constant(self, name: str) -> Any:
        """Return a constant of the folder with the components."""
        return getattr(self._package, name)

    def offered(self) -> list[str]:
        """Return the names of the components that installed packages offer."""
        return [name for name in self._names() if name not in self._files]

    @property
    def _package(self) -> ModuleType:
        return importlib.import_module(f"{PACKAGE}.{self.folder}")

    @cached_property
    def _files(self) -> frozenset[str]:
        """Names of xtrain's own components: the modules in their folder."""
        names = (module.name for module in pkgutil.iter_modules(self._package.__path__))
        return frozenset(
            n for n in names if n != _USER and not n.startswith("_") and not n.endswith(("_torch", "_run"))
        )

    def _import(self, module: str) -> None:
        importlib.import_module(f"{PACKAGE}.{self.folder}.{module}")

    # The kind as one block: for messages about a block with an unknown label ----------------------------------------

    def label(self) -> attrs.Attribute:
        """Return the label attribute, with all registered names as its words; no component is loaded for it."""
        words = Literal[tuple(self)]  # type: ignore[valid-type]
        return attrs.fields(_Named).kind.evolve(name=self.key, alias=self.key, type=words, default=attrs.NOTHING)

    def settings(self) -> Mapping[str, tuple[attrs.Attribute, Setting]]:
        """Return the settings of all components; `only` and `required_by` say which components have them. If several
        share a name, the first of the largest group of equal ones represents all, with the words of all."""
        components = tuple(self.items())
        if self._settings is None or self._settings[0] != components:
            self._settings = components, MappingProxyType(self._merged_settings())
        return self._settings[1]

    def _merged_settings(self) -> dict[str, tuple[attrs.Attribute, Setting]]:
        owners: dict[str, list[str]] = {}
        needed: dict[str, list[str]] = {}
        said: dict[str, list[tuple[attrs.Attribute, Setting]]] = {}
        for label, component in self.items():
            for attribute in attrs.fields(component):
                meta = attribute.metadata.get("setting")
                if meta is None:
                    continue
                owners.setdefault(attribute.name, []).append(label)
                if attribute.default is attrs.NOTHING:
                    needed.setdefault(attribute.name, []).append(label)
                said.setdefault(attribute.name, []).append((attribute, meta))
        found = {}
        for name, each in said.items():
            alike = [[one[1] == other[1] and one[0].default == other[0].default for other in each] for one in each]
            attribute, meta = each[max(range(len(each)), key=lambda place: sum(alike[place]))]
            everywhere = len(owners[name]) == len(self)
            only = () if everywhere else tuple(owners[name])
            by_all = len(needed.get(name, ())) == len(self)
            required = () if by_all or not needed.get(name) else tuple(needed[name])
            merged = attrs.evolve(meta, only=only, required_by=required)
            # If only some labels require a value, the block as a whole does not.
            default = None if required else attribute.default
            evolved = attribute.evolve(
                type=_words_of([other.type for other, _ in each]) or attribute.type,
                default=default,
                metadata={**attribute.metadata, "setting": merged},
            )
            found[name.removesuffix("_")] = (evolved, merged)
        return found


def _words_of(types: Sequence[Any]) -> Any:
    """Return the union of the words if all types are Literals, else None."""
    if not all(get_origin(each) is Literal for each in types):
        return None
    return Literal[tuple(dict.fromkeys(word for each in types for word in get_args(each)))]  # type: ignore[valid-type]


@cache
def offered_modules() -> "Sequence[EntryPoint]":
    """Return the modules with components that installed packages offer.

    `importlib.metadata` takes 20 ms, so it is imported only if a package may offer one.
    """
    if not _may_be_offered():
        return ()
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def _may_be_offered() -> bool:
    """Return True if an installed package has entry points for components, or if only `importlib.metadata` can tell:
    metadata in archives and eggs, and of other finders."""
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True
    for path in map(Path, sys.path):
        try:
            entries = list(path.iterdir())
        except NotADirectoryError:
            return True
        except OSError:
            continue
        for entry in entries:
            if entry.suffix == ".egg":
                return True
            if entry.suffix in (".dist-info", ".egg-info"):
                with suppress(OSError):
                    if ENTRY_POINTS.encode() in (entry / "entry_points.txt").read_bytes():
                        return True
    return False


def load_offered() -> None:
    """Import the modules with components that installed packages offer, once; a failure is recorded in `faults`.

    A module imported while one of xtrain's modules is still loading may miss names, through no fault of its package; it
    is imported again at the next request.
    """
    if Registry.asked:
        return
    Registry.asked = True
    before, again = Registry._offers, False
    for offered in offered_modules():
        # A module can register components of several kinds.
        Registry._offers = offered.dist.name if offered.dist is not None else offered.value
        try:
            offered.load()
        except Exception as error:  # third-party code can raise anything
            if isinstance(error, ImportError) and _is_importing():
                again = True
            else:
                Registry.faults[Registry._offers] = f"{type(error).__name__}: {error}"
        finally:
            Registry._offers = before
    Registry.asked = not again


def _is_importing() -> bool:
    """Return True if a module of xtrain is currently being imported."""
    root = PACKAGE.partition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{root}.")]
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


def registry_of(block: type) -> "Registry[Any] | None":
    """Return the registry whose base class is this block class; None for any other class, including components."""
    return block.__dict__.get("components")


def is_call(kind: Any) -> TypeGuard[type[Component]]:
    """Return True if an annotation is the base class of components chosen by calls, as in `source = text("*.txt")`."""
    return isinstance(kind, type) and issubclass(kind, Component) and bool(kind.components.call)


def members_of(block: type) -> "Registry[Any] | None":
    """Return the registry whose components are the settings of a block; None for any other class."""
    return block.__dict__.get("members")


def variant(block: type, label: Any) -> type:
    """Return the class of a block's object with this label."""
    registry = registry_of(block)
    if registry is None:
        return complete(block)
    return registry[label] if label in registry else registry.default  # noqa: SIM401  it loads nothing else


def variants(block: type) -> tuple[type, ...]:
    """Return all classes that a block can have."""
    registry = registry_of(block)
    return (block,) if registry is None else tuple(registry.values())


def planned(component: Component, contract: type[C]) -> C:
    """Return a component as an instance of its contract."""
    assert isinstance(component, contract)
    return component


def planned_class(component: type[Component], contract: type[C]) -> type[C]:
    """Return a class of components as a subclass of its contract."""
    assert issubclass(component, contract)
    return component
