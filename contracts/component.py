"""Checked views of components as instances of their contracts."""

from typing import TypeVar

from xtrain.dsl.schema.component import Component

C = TypeVar("C", bound=Component)


def planned(component: Component, contract: type[C]) -> C:
    """Return a component as an instance of its contract. Raises TypeError for a component, such as one of an installed
    package, whose class subclasses only the class of the language."""
    planned_class(type(component), contract)
    assert isinstance(component, contract)
    return component


def planned_class(component: type[Component], contract: type[C]) -> type[C]:
    """Return a class of components as a subclass of its contract. Raises TypeError as `planned` does."""
    if not issubclass(component, contract):
        raise TypeError(
            f"{component.__module__}.{component.__qualname__} does not subclass {contract.__name__} and so lacks "
            f"methods that planning calls: import {contract.__name__} from {contract.__module__} and subclass it"
        )
    return component
