"""`base fp8 { … }`: 8-bit floating point, e4m3 (Micikevicius et al. 2022, arXiv 2209.05433)."""

from typing import ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.precision import BASES, Base, block_size
from xtrain.lazy_attrs import frozen


@BASES.register()
@frozen
class Float8(Base):
    """`base fp8 { … }`: an e4m3 number from -448 to 448 per element, with a scale per block."""

    kind: str = named("fp8")
    block: int = block_size(128)

    bits: ClassVar[int] = 8
