"""Typed views of components as instances of their contracts; `Registry.register` checks that they are."""

from typing import TypeVar

from xtrain.dsl.schema.component import Component

C = TypeVar("C", bound=Component)


def planned(component: Component, contract: type[C]) -> C:
    """Return a component as an instance of its contract."""
    assert isinstance(component, contract)
    return component


def planned_class(component: type[Component], contract: type[C]) -> type[C]:
    """Return a class of components as a subclass of its contract."""
    assert issubclass(component, contract)
    return component
