"""`engine vllm`: the HTTP protocol of vLLM's server.

Completions and adapters: docs.vllm.ai, "OpenAI-compatible server" and "LoRA adapters". Weights of the model: the
development endpoints /collective_rpc with `reload_weights`, /pause, /resume, /reset_prefix_cache, /weight_info and
/update_weight_version ("Weight transfer", "Sleep mode").
"""

from pathlib import Path
from typing import Any

from xtrain.client.http import ServerRefused
from xtrain.runtime.sampling.engines import (
    EngineFailed,
    EngineHttp,
    EngineNeeds,
    SampleAsked,
    SampledText,
    WeightsLost,
    WrongAnswer,
    numbers_of,
    one_at_a_time,
    seed_of,
)

NOT_FOUND = 404
LOADING = "loading"  # version of an engine between two models


class VllmConnection:
    """A server of vLLM."""

    def __init__(self, url: str, key: str | None, patience: float) -> None:
        self.http = EngineHttp(url, key, patience)
        self.model = ""
        self.adapts = False

    def check(self, needs: EngineNeeds) -> None:
        self.adapts = needs.rank > 0
        listed = self.http.json("GET", "v1/models")
        try:
            model: dict[str, Any] = next(each for each in listed["data"] if not each.get("parent"))
            self.model, room = str(model["id"]), model.get("max_model_len")
        except (KeyError, TypeError, StopIteration, AttributeError):
            raise WrongAnswer("/v1/models lists no model") from None
        if isinstance(room, int) and room < needs.context:
            message = (
                f"vLLM has room for {room} tokens of a prompt and its completion, and the run needs {needs.context}"
            )
            raise EngineFailed(f"{message}: start it with `--max-model-len {needs.context}`")
        if not self.adapts:
            self._version("start it with VLLM_SERVER_DEV_MODE=1, in a version that has this endpoint")

    def put(self, folder: Path, name: str) -> str:
        path = str(folder.resolve())
        if self.adapts:
            try:
                self.http.post("v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
            except ServerRefused as refused:
                if "already been loaded" in refused.message:  # the answer to an earlier request was lost
                    return name
                hint = "start it with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
                known = f"{refused} ({hint})" if refused.status == NOT_FOUND else str(refused)
                raise EngineFailed(f"vLLM does not load the adapter {path}: {known}") from refused
            return name
        with one_at_a_time(folder):
            if self._version() != name:  # another rank may have given it the weights meanwhile
                self._reload(path, name)
        return name

    def _reload(self, path: str, name: str) -> None:
        self.http.post("pause?mode=wait", {})
        self.http.post("update_weight_version", {"new_version": LOADING})
        self.http.post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        self.http.post("reset_prefix_cache", {})
        self.http.post("update_weight_version", {"new_version": name})
        self.http.post("resume", {})

    def sample(self, weights: str, asked: SampleAsked) -> list[SampledText]:
        if not self.adapts and (version := self._version()) != weights:
            raise WeightsLost(f"it has version {version}")
        body = {
            "model": weights if self.adapts else self.model,
            "prompt": list(asked.prompt),
            "n": len(asked.keys),
            "max_tokens": asked.most,
            "temperature": asked.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "seed": seed_of(asked.keys[0]),
            "stop": list(asked.ends.texts),
            "stop_token_ids": sorted(asked.ends.tokens),
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        try:
            answer = self.http.json("POST", "v1/completions", body)
        except ServerRefused as refused:
            if refused.status == NOT_FOUND:
                raise WeightsLost(refused.message) from refused
            raise
        texts = texts_of(answer, body["model"], body["prompt"])
        if not self.adapts and (version := self._version()) != weights:
            raise WeightsLost(f"it has version {version} by now")
        return texts

    def drop(self, weights: str) -> None:
        if self.adapts:
            self.http.post("v1/unload_lora_adapter", {"lora_name": weights})

    def _version(self, hint: str = "") -> str:
        try:
            found = self.http.json("GET", "weight_info")
        except ServerRefused as refused:
            raise EngineFailed(f"vLLM does not say which weights it has: /weight_info: {refused}; {hint}") from refused
        try:
            return str(found["weight_version"])
        except (KeyError, TypeError):
            raise WrongAnswer("/weight_info says no version") from None


def texts_of(answer: Any, model: str, prompt: list[int]) -> list[SampledText]:
    """Return the texts of an answer of /v1/completions, in order. Raises WrongAnswer."""
    if not isinstance(answer, dict) or not isinstance(choices := answer.get("choices"), list):
        raise WrongAnswer("it has no `choices`")
    if answer.get("model") != model:
        raise WrongAnswer(f"it is of the model {answer.get('model')!r}, and {model!r} was asked")
    try:
        choices = sorted(choices, key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != [*range(len(choices))]:
            raise WrongAnswer("a choice comes twice, or is missing")
        found = []
        for choice in choices:
            if choice.get("prompt_token_ids") not in (None, prompt):
                raise WrongAnswer("it continues another prompt")
            if choice.get("finish_reason") not in ("stop", "length"):
                raise WrongAnswer(f"a text ended by {choice.get('finish_reason')!r}")
            tokens = numbers_of(choice["token_ids"], "`token_ids`", int)
            found.append(
                SampledText(tokens, numbers_of(choice["logprobs"]["token_logprobs"], "`token_logprobs`", float))
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise WrongAnswer(f"a choice is incomplete: {error}") from None
    return found


def connect(url: str, key: str | None, patience: float) -> VllmConnection:
    """Return a connection to a server of vLLM."""
    return VllmConnection(url, key, patience)
