"""`serve { … }`: a training server in place of a training run."""

from typing import Final, Literal

from attrs import frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.names import file_path, host_name, some_text, variable_name, web_origin
from xtrain.dsl.schema.setting import Range, Role, at_least, positive, setting

KEY_VARIABLE: Final = "XTRAIN_KEY"  # with the keys of a server whose spec names none


@frozen
class Serve:
    """`serve { … }`: a server that trains adapters over the model, or the model itself, as clients ask it to, step by
    step; `adapter` says how large an adapter may be."""

    model: str | None = setting(
        "what clients call the model; none: the name of the experiment",
        default=None,
        check=some_text,
        role=Role.EXECUTION,
        example='"Qwen/Qwen3-8B"',
    )
    mode: Literal["adapters", "full"] = setting(
        "adapters: each client trains an adapter of its own, of which many are in memory; full: one client at a time "
        "trains all of the model",
        default="adapters",
        role=Role.EXECUTION,
    )
    adapters: int = setting(
        "adapters that are in memory at once", default=16, check=Range(low=1, high=999), role=Role.EXECUTION
    )
    max_tokens: int = setting(
        "tokens of the longest text that a client may send or have written",
        default=2048,
        check=at_least(2),
        role=Role.EXECUTION,
    )
    rows: int = setting(
        "texts that a data rank computes at once", default=1, check=at_least(1), role=Role.MESH, example="4"
    )
    host: str = setting(
        "address that the server listens on; any but the one of this machine itself needs `key`",
        default="127.0.0.1",
        check=some_text,
        role=Role.EXECUTION,
    )
    port: int = setting(
        "port that the server listens on", default=8000, check=Range(low=1, high=65535), role=Role.EXECUTION
    )
    key: str | None = setting(
        "name of the environment variable with the key that clients must show, or with `NAME=KEY` for each of several "
        "owners, who see nothing of one another; none: XTRAIN_KEY, and where that is not set a key that the server "
        "makes at its first start, prints, and keeps in its directory",
        default=None,
        check=variable_name,
        role=Role.EXECUTION,
        example='"SUPPORT_KEY"',
    )
    hosts: tuple[str, ...] = setting(
        "further names by which clients connect, which a browser that was led to the server by another name does not "
        "know; `host`, the address that a client has connected to, and localhost are always taken",
        default=(),
        check=host_name,
        role=Role.EXECUTION,
        example='["gpu1.lab"]',
    )
    origins: tuple[str, ...] = setting(
        "origins of web pages that may call the server, with a key; pages of any other are refused",
        default=(),
        check=web_origin,
        role=Role.EXECUTION,
        example='["https://lab.example"]',
    )
    certificate: str | None = setting(
        "file (PEM) with the certificate of the server, and those that it is signed by, relative to the working "
        "folder; none: clients connect without TLS",
        default=None,
        check=file_path,
        role=Role.EXECUTION,
        example='"tls/server.pem"',
    )
    private_key: str | None = setting(
        "file (PEM) with the private key of `certificate`, without a passphrase",
        default=None,
        check=file_path,
        role=Role.EXECUTION,
        example='"tls/server.key"',
    )
    queue: int = setting(
        "requests that wait at most; further ones are asked to come later",
        default=256,
        check=at_least(1),
        role=Role.EXECUTION,
    )
    idle: Quantity = setting(
        "time without a word from a client after which its adapters are saved and leave memory",
        default=Quantity(1800, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="30 min",
    )

    @property
    def key_variable(self) -> str:
        """The environment variable that is read for keys."""
        return self.key or KEY_VARIABLE

    @property
    def places(self) -> int:
        """Models that clients may have in memory at once."""
        return 1 if self.mode == "full" else self.adapters
