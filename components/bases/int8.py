"""`base int8 { … }`: integers from -127 to 127."""

from typing import ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.precision import BASES, Base, block_size
from xtrain.lazy_attrs import frozen


@BASES.register()
@frozen
class Int8(Base):
    """`base int8 { … }`: an integer from -127 to 127 per element, with a scale per block."""

    kind: str = named("int8")
    block: int = block_size(128)

    bits: ClassVar[int] = 8
