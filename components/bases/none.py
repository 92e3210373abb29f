"""`base none { … }`."""

from typing import ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.precision import BASES, Base
from xtrain.lazy_attrs import frozen


@BASES.register()
@frozen
class PlainBase(Base):
    """`base none { … }`: frozen matrices are stored like other frozen parameters."""

    kind: str = named("none")

    stores: ClassVar[bool] = False
