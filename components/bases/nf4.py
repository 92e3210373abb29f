"""`base nf4 { … }`: 4-bit NormalFloat (Dettmers et al. 2023, arXiv 2305.14314, section 3)."""

from typing import ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.precision import BASES, Base, block_size
from xtrain.dsl.schema.setting import setting
from xtrain.lazy_attrs import frozen


@BASES.register()
@frozen
class NormalFloat4(Base):
    """`base nf4 { … }`: 4-bit NormalFloat with 16 levels and a scale per block; values as in bitsandbytes."""

    kind: str = named("nf4")
    block: int = block_size(64)
    double: bool = setting("store scales in 8 bits, with a second scale per 256 scales", default=True)

    bits: ClassVar[int] = 4
    unpacking: ClassVar[int] = 6  # two bytes for the index into the table of levels
