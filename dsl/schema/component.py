"""Components: what a spec chooses by name, each a class that is registered by the file that says all there is of it.

`optimizer adamw { … }` is an object of the class that is registered as `adamw` among the optimizers, and so is
`text("*.txt")` of the one that is registered as `text` among the sources, with its settings as arguments. The base
class of a kind says what the rest of xtrain asks of a component; it stands for the block where no component is chosen
yet.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, Final, Generic, Literal, TypeGuard, TypeVar, get_args, get_origin

import attrs

from xtrain.dsl.schema.setting import Range, Setting, complete
from xtrain.dsl.values import HiddenText, digests_in

C = TypeVar("C", bound="Component")
PACKAGE: Final = f"{__name__.partition('.dsl.')[0]}.components"
ENTRY_POINTS: Final = "xtrain.components"
# The module of a folder of components whose class functions of the user's own inherit from.
_USER: Final = "user_part"


# The default of a parameter that only running the file would tell.
COMPUTED: Final = object()


@attrs.frozen
class Offer:
    """What a component is called, and by whom. word: of its kind. package: `xtrain`, or the installed one that offers
    it."""

    word: str
    name: str
    package: str


class Component:
    """The base of all components.

    kind: the name a spec chooses it by; of model families it is called `family`. A class declares it by `named`, and
    its settings beside it; or as a class variable where no label says it, as that of a call, or where the label says
    another thing, as in `eval DATASET`.
    """

    components: ClassVar["Registry[Any]"]
    offer: ClassVar[Offer | None] = None
    """None of a base class, and of a function of the user's own."""
    hands_on: ClassVar[bool] = False
    """Texts of its settings are handed on unread, to a command, a service or the user's code: values of `env` in them
    are hidden."""
    kind: str

    @classmethod
    def torch_module(cls) -> str:
        """The module that ranks import for it: `…_torch`, beside its own."""
        return f"{cls.__module__}_torch"

    @classmethod
    def run_module(cls) -> str:
        """The module that any process imports which runs it, without torch: `…_run`, beside its own."""
        return f"{cls.__module__}_run"


class UserComponent(Component):
    """A component that is a function of the user's own, from a module that `use` names; a class of its own for each.

    declared: the arguments of its decorator. purpose: the first line of its docstring. filled: names of the parameters
    that the run fills. Its settings are the others, each with a `_` behind its name.
    """

    hands_on = True
    module: ClassVar[str] = ""
    function: ClassVar[str] = ""
    digest: ClassVar[str] = ""
    declared: ClassVar[Mapping[str, Any]] = {}
    filled: ClassVar[tuple[str, ...]] = ()
    purpose: ClassVar[str] = ""
    declaration: ClassVar[Any] = None
    """What was read of its text, a `Declared`."""

    @classmethod
    def base_of(cls, declared: Any) -> type:
        """The class that a function which was read becomes a subclass of."""
        return cls

    def given(self) -> dict[str, Any]:
        """The arguments of the function by name, in the order of its parameters; without those whose default only the
        code knows."""
        values = {name: getattr(self, a.name) for name, a in parameters_of(type(self)).items()}
        return {name: value for name, value in values.items() if value is not COMPUTED}

    def call(self) -> dict[str, Any]:
        """What the run calls, and with what, as JSON: the argument `user` of its node.

        variables: name → digest of the environment variables in the arguments; only where there are any.
        """
        variables = digests_in(self.given())
        return {"module": self.module, "function": self.function, "digest": self.digest,
                "arguments": _plain(self.given()), **({"variables": variables} if variables else {})}  # fmt: skip

    def identified(self) -> list[Any]:
        """As JSON: what identifies it, wherever its file lies."""
        variables = digests_in(self.given())
        return [self.digest, self.function, _plain(self.given()), *([variables] if variables else [])]


def parameter(name: str, kind: Any, default: Any, check: Range | None = None, doc: str = "") -> Any:
    """A parameter of a function of the user's own as an attribute, which may have any name."""
    meta = Setting(doc=doc or "argument of your function", check=check, example="…")
    return attrs.field(
        default=default, type=kind, kw_only=True, alias=f"{name}_", metadata={"setting": meta, "parameter": True}
    )


def parameters_of(component: type[UserComponent]) -> dict[str, attrs.Attribute]:
    """The parameters of a function of the user's own by their names, as attributes of its component."""
    return {a.name[:-1]: a for a in attrs.fields(component) if is_parameter(a)}


def is_parameter(attribute: attrs.Attribute) -> bool:
    """Whether a setting is a parameter of a function of the user's own."""
    return "parameter" in attribute.metadata


def _plain(value: Any) -> Any:
    """A value of a spec as JSON."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, HiddenText) else value


def named(name: str) -> Any:
    """Declare `kind`, or what the registry calls it, with the name that a spec chooses a component by."""
    return attrs.field(default=name)


class Registry(Generic[C], Mapping[str, type[C]]):
    """Name → class of the components of one kind; a component is loaded when it is first asked for.

    word: opens the block, or is the name of the call. folder: of xtrain's own components, a file each with the name of
    the component. Installed packages offer others through entry points of the group `xtrain.components`: modules that
    register what they define. Functions of the user are known to the spec that uses them, and not registered.
    `DEFAULT` of the folder names the component of a spec without the block, which also replaces a call that is wrong;
    without it, that is the first one. key: the attribute with the name of a component. call: how a component of a kind
    that is chosen by calls is written without arguments; empty for blocks. order: sort key of the components, before
    the default comes first and the others by their names.
    """

    _offers: ClassVar[str] = "xtrain"
    """The package whose module is being loaded."""
    asked: ClassVar[bool] = False
    """True when the modules that installed packages offer are loaded, and while they are being loaded."""
    faults: ClassVar[dict[str, str]] = {}
    """Installed package whose components cannot be loaded → why."""
    of_calls: ClassVar[dict[str, "Registry[Any]"]] = {}
    """Word → the registry of components that are chosen by calls."""

    def __init__(
        self,
        word: str,
        folder: str,
        key: str = "kind",
        *,
        call: str = "",
        order: Callable[[type[C]], Any] | None = None,
    ) -> None:
        self.word, self.folder, self.key, self.call, self._order = word, folder, key, call, order
        self._own: dict[str, type[C]] = {}
        self._user: type[C] | None = None
        if call:
            Registry.of_calls[word] = self
        self._settings: tuple[Any, Mapping[str, tuple[attrs.Attribute, Setting]]] | None = None

    def base(self, block: type[C]) -> type[C]:
        """Decorates the base class of the kind."""
        block.components = self
        return block

    def register(self) -> Callable[[type[C]], type[C]]:
        """Decorates a component."""

        def add(component: type[C]) -> type[C]:
            own = component.__dict__.get(self.key)
            name = own if isinstance(own, str) else attrs.fields_dict(component)[self.key].default
            assert isinstance(name, str)
            known = self._own.get(name)
            assert known is None or known.__module__ == component.__module__, f"{self.word} {name} is defined twice"
            ours = component.__module__.startswith(f"{PACKAGE}.")
            assert ours or name not in self._files, f"{self.word} {name} is defined twice"
            self._own[name] = component
            component.offer = Offer(self.word, name, "xtrain" if ours else Registry._offers)
            return component

        return add

    def user(self, component: type[C]) -> type[C]:
        """Decorates the class that functions of the user's own inherit from, a `UserComponent`."""
        self._user = component
        return component

    @cached_property
    def takes_functions(self) -> bool:
        """True if a function of the user's own can be one."""
        return find_spec(f"{PACKAGE}.{self.folder}.{_USER}") is not None

    @property
    def of_users(self) -> type[C]:
        """The class that functions of the user's own inherit from."""
        assert self.takes_functions, f"no {self.word} can be a function of the user's own"
        self._import(_USER)
        assert self._user is not None
        return self._user

    def of(self, args: Mapping[str, Any]) -> type[C]:
        """The component that the arguments of a node mean."""
        return self.of_users if "user" in args else self[args["kind"]]

    @property
    def default(self) -> type[C]:
        """The component of a spec that names none; the first where the block must be written."""
        return self[self._default or next(iter(self))]

    def of_kind(self, kind: str) -> type[C] | None:
        """The component that a plan calls so, that of the user's own functions among them, where calls choose it."""
        if kind in self:
            return self[kind]
        return self.of_users if self.takes_functions and self.of_users.kind == kind else None

    def form(self, name: str) -> str:
        """How a call of a component without arguments is written."""
        return self.call.format(name)

    def origin(self, name: str) -> str:
        """Where a component comes from: `xtrain`, or the installed package that offers it."""
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
        return name in self._own or name in self._files or name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        """The names of all components, in the order of the schema."""
        load_offered()
        names = {*self._files, *self._own}
        order = self._order
        return sorted(names, key=lambda name: (order and order(self[name]), name != self._default, name))

    @cached_property
    def _default(self) -> str:
        return getattr(self._package, "DEFAULT", "")

    @property
    def _package(self) -> ModuleType:
        return importlib.import_module(f"{PACKAGE}.{self.folder}")

    @cached_property
    def _files(self) -> frozenset[str]:
        """The names of xtrain's own components: those of the modules in their folder."""
        names = (module.name for module in pkgutil.iter_modules(self._package.__path__))
        return frozenset(
            n for n in names if n != _USER and not n.startswith("_") and not n.endswith(("_torch", "_run"))
        )

    def _import(self, module: str) -> None:
        importlib.import_module(f"{PACKAGE}.{self.folder}.{module}")

    # The kind as one block: for what is said of a block whose label is not known ------------------------------------

    def label(self) -> attrs.Attribute:
        """The attribute that the label fills, with all names there are."""
        label = attrs.fields_dict(self.default)[self.key]
        return label.evolve(type=Literal[tuple(self)], default=attrs.NOTHING)  # type: ignore[valid-type]

    def settings(self) -> Mapping[str, tuple[attrs.Attribute, Setting]]:
        """The settings of all components; `only` and `required_by` say which have them. Of several that share a name
        the first of those that most agree with speaks for all, but for the words that may be written."""
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
            attribute, meta = max(each, key=lambda one: sum(_same_setting(one, other) for other in each))
            everywhere = len(owners[name]) == len(self)
            only = () if everywhere else tuple(owners[name])
            by_all = len(needed.get(name, ())) == len(self)
            required = () if by_all or not needed.get(name) else tuple(needed[name])
            merged = attrs.evolve(meta, only=only, required_by=required)
            # Where only some labels need a value, the block as such does not.
            default = None if required else attribute.default
            evolved = attribute.evolve(
                type=_words_of([other.type for other, _ in each]) or attribute.type,
                default=default,
                metadata={**attribute.metadata, "setting": merged},
            )
            found[name.removesuffix("_")] = (evolved, merged)
        return found


def _words_of(types: Sequence[Any]) -> Any:
    """The words of all of these, where each is some words; None where one is something else."""
    if not all(get_origin(each) is Literal for each in types):
        return None
    return Literal[tuple(dict.fromkeys(word for each in types for word in get_args(each)))]  # type: ignore[valid-type]


@cache
def offered_modules() -> Sequence[EntryPoint]:
    """The modules with components that installed packages offer. To ask what is installed takes several ms."""
    return tuple(entry_points(group=ENTRY_POINTS))


def load_offered() -> None:
    """Import the modules with components that installed packages offer, once; one that fails is noted in `faults`.

    A module that is imported while one of xtrain's is may meet names that are not there yet. That is no fault of the
    package: it is imported again when components are next asked for.
    """
    if Registry.asked:
        return
    Registry.asked = True
    before, again = Registry._offers, False
    for offered in offered_modules():
        # A module registers components of every kind that it defines.
        Registry._offers = offered.dist.name if offered.dist is not None else offered.value
        try:
            offered.load()
        except Exception as error:  # of somebody else's code, which nothing here may depend on
            if isinstance(error, ImportError) and _is_importing():
                again = True
            else:
                Registry.faults[Registry._offers] = f"{type(error).__name__}: {error}"
        finally:
            Registry._offers = before
    Registry.asked = not again


def _is_importing() -> bool:
    """Whether a module of xtrain is being imported just now."""
    root = PACKAGE.partition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(f"{root}.")]
    return any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules)


def _same_setting(one: tuple[attrs.Attribute, Setting], other: tuple[attrs.Attribute, Setting]) -> bool:
    return one[1] == other[1] and one[0].default == other[0].default


def registry_of(block: type) -> "Registry[Any] | None":
    """The registry that a block class is the base of; None for any other class, components themselves among them."""
    return block.__dict__.get("components")


def is_call(kind: Any) -> TypeGuard[type[Component]]:
    """Whether an annotation is the base class of components that are chosen by calls, as `source = text("*.txt")`."""
    return isinstance(kind, type) and issubclass(kind, Component) and bool(kind.components.call)


def members_of(block: type) -> "Registry[Any] | None":
    """The registry whose components are the settings of a block; None for any other class."""
    return block.__dict__.get("members")


def variant(block: type, label: Any) -> type:
    """The class that an object of a block with this label has."""
    registry = registry_of(block)
    if registry is None:
        return complete(block)
    return registry.get(label, registry.default)


def variants(block: type) -> tuple[type, ...]:
    """All classes that stand behind a block."""
    registry = registry_of(block)
    return (block,) if registry is None else tuple(registry.values())
