"""Environments of other libraries, for use in a class with `@environment`."""

import json
from collections.abc import Callable, Mapping
from typing import Any


def _message(text: str) -> dict[str, Any]:
    return {"message": text}


def _as_json(observation: Mapping[str, Any]) -> str:
    return json.dumps(observation, ensure_ascii=False)


class OpenEnvEpisode:
    """Episode on a server of an OpenEnv environment, over its WebSocket (package `openenv-core`).

    url: of the server, which must support concurrent sessions: each episode has one. action: makes the action of a text
    of the model; by default its field `message`. read: makes the text that the model reads of an observation; by
    default its JSON. Raises ImportError, which says what to install, and what the library raises.
    """

    def __init__(
        self,
        url: str,
        action: Callable[[str], dict[str, Any]] = _message,
        read: Callable[[dict[str, Any]], str] = _as_json,
    ) -> None:
        try:
            from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            hint = "install it with `pip install 'xtrain[openenv]'`"
            raise ImportError(f"environments of OpenEnv need the package openenv-core: {hint}") from error
        self._client = GenericEnvClient(base_url=url).sync()
        self._action, self._read = action, read

    def reset(self, **settings: Any) -> str:
        """Begin the episode, and return its first observation. settings: of the environment's `reset`, as `seed`."""
        return self._read(self._client.reset(**settings).observation)

    def step(self, text: str) -> tuple[str | None, float]:
        """Act, and return the next observation, None at the end, and the reward."""
        result = self._client.step(self._action(text))
        return None if result.done else self._read(result.observation), float(result.reward or 0.0)

    def close(self) -> None:
        """End the session; the end of the process does too."""
        self._client.close()
