"""Contracts of components: base classes with the methods that planning calls, fully typed.

For a kind of component, `dsl/schema` has the class with the facts that the language needs. Where planning needs more
than these facts, this folder has a subclass of it, `Planned…`, whose methods take a resolved spec, an architecture or
findings. Components subclass the `Planned…` class.
"""
