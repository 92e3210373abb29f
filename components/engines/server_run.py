"""`engine server`: the protocol of `xtrain serve`, by the client that programs use."""

import itertools
import secrets
from pathlib import Path
from typing import Final

from xtrain.client.http import HttpClient, RequestFailed, ServerRefused
from xtrain.client.remote import RemoteSampler, Server
from xtrain.runtime.sampling.engines import (
    EngineFailed,
    EngineNeeds,
    SampleAsked,
    SampledText,
    WeightsLost,
    WrongAnswer,
)

GONE: Final = (404, 410)  # of a session, a sampler or a request that a server does not have any more
MOST: Final = 256  # samples of a request


class ServerConnection:
    """An `xtrain serve`. Weights are sent to it; every version is a sampler that never changes."""

    def __init__(self, url: str, key: str | None, patience: float) -> None:
        self._url, self._key, self._patience = url, key, patience
        self._http = HttpClient(url, key, patience)
        self._server: Server | None = None
        # Ranks have samplers in common: none may take the number of another's request.
        self._numbers = itertools.count(secrets.randbits(40) << 12)

    def check(self, needs: EngineNeeds) -> None:
        served = self._http.ask("GET", "get_server_capabilities")["supported_models"][0]
        if served["max_context_length"] < needs.context:
            room = f"{served['max_context_length']} tokens of a prompt and its completion"
            needed = f"{room}, and the run needs {needs.context}"
            raise EngineFailed(f"xtrain serve has room for {needed}: write `serve {{ max_tokens = {needs.context} }}`")

    def put(self, folder: Path, name: str) -> str:
        if self._server is not None:
            try:
                return self._server.upload(folder).id
            except ServerRefused as refused:
                if refused.status not in GONE:  # a server without its directory knows no session
                    raise
        self._server = Server(self._url, key=self._key, name=name, patience=self._patience)
        return self._server.upload(folder).id

    def sample(self, weights: str, asked: SampleAsked) -> list[SampledText]:
        found: list[SampledText] = []
        for first in range(0, len(asked.keys), MOST):
            keys = asked.keys[first : first + MOST]
            sampler = RemoteSampler(self._http, weights, next(self._numbers))
            try:
                texts = sampler.sample(
                    asked.prompt,
                    max_tokens=asked.most,
                    count=len(keys),
                    temperature=asked.temperature,
                    seed=keys,
                    stop=[*sorted(asked.ends.tokens), *asked.ends.texts],
                ).result()
            except ServerRefused as refused:
                if refused.status in GONE:
                    raise WeightsLost(refused.message) from refused
                raise
            except RequestFailed as failed:
                if failed.category != "user":
                    raise WrongAnswer(str(failed)) from failed
                if "no longer kept" in str(failed):
                    raise WeightsLost(str(failed)) from failed
                raise EngineFailed(f"xtrain serve cannot do a request: {failed}") from failed
            except (KeyError, TypeError) as error:
                raise WrongAnswer(f"a sample is incomplete: {error}") from None
            found += [SampledText(text.tokens, text.logprobs) for text in texts]
        return found

    def drop(self, weights: str) -> None:
        self._http.ask("DELETE", f"samplers/{weights}")


def connect(url: str, key: str | None, patience: float) -> ServerConnection:
    """Return a connection to an `xtrain serve`."""
    return ServerConnection(url, key, patience)
