"""`tokenizer hub("org/name", revision = "…")`: the tokenizer of a snapshot in the cache of huggingface_hub."""

from xtrain.components.tokenizers.folder import Folder
from xtrain.dsl.checking.config_json import snapshot_folder
from xtrain.dsl.schema.data_components import TOKENIZERS
from xtrain.dsl.schema.model import snapshot_named
from xtrain.lazy_attrs import frozen


@TOKENIZERS.register()
@frozen
class HubTokenizer(Folder):
    """`tokenizer hub("org/name", revision = "…")`: a `tokenizer.json` of a downloaded snapshot."""

    kind = "hub"
    of_files = False

    @classmethod
    def place(cls, source: str) -> str:
        return source

    @classmethod
    def location(cls, source: str) -> str:
        return snapshot_folder(*_snapshot(source)).as_posix()

    @classmethod
    def does(cls, source: str) -> str:
        repo, commit = _snapshot(source)
        return f"read tokenizer.json of {repo} at {commit[:12]}"


def _snapshot(source: str) -> tuple[str, str]:
    """Return (repository, commit) of a tokenizer of this kind."""
    found = snapshot_named(source)
    assert found is not None
    return found
