"""`engine vllm { … }`: a server of vLLM samples."""

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.policy import ENGINES, SamplingEngine
from xtrain.lazy_attrs import frozen


@ENGINES.register()
@frozen
class VllmEngine(SamplingEngine):
    """`engine vllm { … }`: a server of vLLM that samples, with VLLM_SERVER_DEV_MODE=1, or for adapters with
    `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."""

    kind: str = named("vllm")

    title = "vLLM"
