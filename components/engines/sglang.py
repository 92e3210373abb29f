"""`engine sglang { … }`: a server of SGLang samples."""

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.policy import ENGINES, SamplingEngine
from xtrain.lazy_attrs import frozen


@ENGINES.register()
@frozen
class SglangEngine(SamplingEngine):
    """`engine sglang { … }`: a server of SGLang that samples, for adapters with `--enable-lora`."""

    kind: str = named("sglang")

    title = "SGLang"
