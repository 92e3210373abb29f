"""`precision`: the number formats that a run computes in and stores."""

from typing import Literal

import attrs
from attrs import frozen

from xtrain.dsl.schema.bases import BASES, Base
from xtrain.dsl.schema.fp8 import Fp8
from xtrain.dsl.schema.setting import Role, setting


@frozen
class Precision:
    """`precision { … }`: number formats."""

    params: Literal["fp32", "fp64", "bf16"] = setting("format of parameters and optimizer state", default="fp32")
    compute: Literal["auto", "fp32", "fp64", "bf16", "fp8"] = setting(
        "format of forward and backward; auto: that of the parameters; fp8: that of products of blocks alone",
        default="auto",
    )
    fp8: Fp8 = setting("settings of `compute = fp8`", default=Fp8(), added=True)
    base: Base = setting(
        "how matrices of blocks that are not trained are stored",
        default=attrs.Factory(lambda: BASES.default()),
        added=True,
    )
    matmul: Literal["auto", "highest", "high", "medium"] = setting(
        "fp32 matmul precision; auto: the fastest setting that keeps fp32 accuracy in a test on the device",
        default="auto",
        role=Role.EXECUTION,
    )
    deterministic: bool = setting(
        "compute the same numbers each time on the same machine; an operation that torch has no such algorithm for is "
        "an error",
        default=False,
        role=Role.EXECUTION,
        added=True,
    )

    @property
    def scaled(self) -> Fp8 | None:
        """How products of blocks are computed in fp8; None where they are not."""
        return self.fp8 if self.compute == "fp8" else None
