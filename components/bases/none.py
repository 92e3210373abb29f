"""`base none { … }`."""

from typing import ClassVar

from attrs import frozen

from xtrain.dsl.schema.bases import BASES, Base
from xtrain.dsl.schema.component import named


@BASES.register()
@frozen
class PlainBase(Base):
    """`base none { … }`: matrices that are not trained are stored as other parameters that are not."""

    kind: str = named("none")

    stores: ClassVar[bool] = False
