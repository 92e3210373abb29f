"""A block with a setting that is chosen by calls, of a kind that xtrain itself has not: `bend { by = line(2.0) }`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
from attrs import frozen

from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, setting


@contextmanager
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The block is one of those of a spec inside; gives its class."""
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "of_calls", dict(Registry.of_calls))
        curves = Registry["Curve"]("curve", "sources", call="{}()")
        curves._files, curves.takes_functions = frozenset(), False  # of no folder

        @curves.base
        @frozen
        class Curve(Component):
            """`NAME(…)`: how something bends."""

        @curves.register()
        @frozen
        class Line(Curve):
            """`line(2.0)`: not at all."""

            kind: ClassVar[str] = "line"
            slope: float = setting("how steep", default=1.0, check=at_least(0))

        @curves.register()
        @frozen
        class Wave(Curve):
            """`wave(by = line())`: up and down, along another."""

            kind: ClassVar[str] = "wave"
            by: Curve | Auto = setting("along which", default=AUTO)  # noqa: RUF009

        @frozen
        class Bend:
            """`bend { … }`: bends."""

            by: Curve | Auto = setting("how", default=AUTO)  # noqa: RUF009
            several: tuple[Curve, ...] = setting("one behind the other", default=(Line(),))

        patch.setitem(blocks.KINDS, "bend", Bend)
        yield Bend
