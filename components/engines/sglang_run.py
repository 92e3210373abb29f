"""`engine sglang`: the HTTP protocol of SGLang's server.

docs.sglang.io: "SGLang Native APIs" (/generate, /model_info), "LoRA Serving" (/load_lora_adapter) and "SGLang for RL
Systems" (/update_weights_from_disk with `weight_version`).
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


class SglangConnection:
    """A server of SGLang."""

    def __init__(self, url: str, key: str | None, patience: float) -> None:
        self.http = EngineHttp(url, key, patience)
        self.adapts = False

    def check(self, needs: EngineNeeds) -> None:
        self.adapts = needs.rank > 0
        self._version()

    def put(self, folder: Path, name: str) -> str:
        path = str(folder.resolve())
        if self.adapts:
            self._done("load_lora_adapter", {"lora_name": name, "lora_path": path}, unless="already")
            return name
        with one_at_a_time(folder):
            if self._version() != name:  # another rank may have given it the weights meanwhile
                body = {"model_path": path, "weight_version": name, "flush_cache": True}
                self._done("update_weights_from_disk", body)
        return name

    def sample(self, weights: str, asked: SampleAsked) -> list[SampledText]:
        settings = {
            "max_new_tokens": asked.most,
            "temperature": asked.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "stop": list(asked.ends.texts),
            "stop_token_ids": sorted(asked.ends.tokens),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        body = {
            "input_ids": [list(asked.prompt)] * len(asked.keys),
            "sampling_params": [{**settings, "sampling_seed": seed_of(key)} for key in asked.keys],
            "return_logprob": True,
            **({"lora_path": [weights] * len(asked.keys)} if self.adapts else {}),
        }
        try:
            answers = self.http.json("POST", "generate", body)
        except ServerRefused as refused:
            if self.adapts and weights in refused.message:
                raise WeightsLost(refused.message) from refused
            raise
        if not isinstance(answers, list):
            raise WrongAnswer("the answer to /generate is no list")
        return [self._text(answer, weights) for answer in answers]

    def _text(self, answer: Any, weights: str) -> SampledText:
        try:
            about = answer["meta_info"]
            if not self.adapts and about["weight_version"] != weights:
                raise WeightsLost(f"it has version {about['weight_version']}")
            if about["finish_reason"]["type"] not in ("stop", "length"):
                raise WrongAnswer(f"a text ended by {about['finish_reason']['type']!r}")
            drawn = about["output_token_logprobs"]
            tokens = numbers_of([each[1] for each in drawn], "tokens", int)
            return SampledText(tokens, numbers_of([each[0] for each in drawn], "log-probabilities", float))
        except (KeyError, TypeError, IndexError) as error:
            raise WrongAnswer(f"the answer to /generate is incomplete: {error}") from None

    def drop(self, weights: str) -> None:
        if self.adapts:
            self._done("unload_lora_adapter", {"lora_name": weights})

    def _done(self, path: str, body: dict[str, Any], unless: str | None = None) -> None:
        """Send a change. unless: part of the message of one that was done before, its answer being lost."""
        try:
            answer = self.http.json("POST", path, body)
            done, message = bool(answer["success"]), str(answer.get("message") or answer.get("error_message") or "")
        except ServerRefused as refused:
            done, message = False, str(refused)
        except (KeyError, TypeError, AttributeError):
            raise WrongAnswer(f"the answer to /{path} has no `success`") from None
        if not done and not (unless is not None and unless in message):
            raise EngineFailed(f"SGLang does not do /{path} with {next(iter(body.values()))}: {message}")

    def _version(self) -> str:
        found = self.http.json("GET", "model_info")
        try:
            return str(found["weight_version"])
        except (KeyError, TypeError):
            raise WrongAnswer("/model_info says no `weight_version`") from None


def connect(url: str, key: str | None, patience: float) -> SglangConnection:
    """Return a connection to a server of SGLang."""
    return SglangConnection(url, key, patience)
