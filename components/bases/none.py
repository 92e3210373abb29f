"""`base none { … }`."""

from typing import ClassVar

from attrs import frozen

from xtrain.dsl.schema.bases import BASES, Base
from xtrain.dsl.schema.component import named


@BASES.register()
@frozen
class PlainBase(Base):
    """`base none { … }`: frozen matrices are stored like other frozen parameters."""

    kind: str = named("none")

    stores: ClassVar[bool] = False
