"""A `tokenizer.json` in the cache of huggingface_hub."""

from pathlib import Path

from xtrain.components.tokenizers.folder_run import HuggingFaceTokenizer
from xtrain.components.tokenizers.hub import HubTokenizer
from xtrain.runtime.feed.tokenizers import TextTokenizer


def open_tokenizer(source: str, base: Path) -> TextTokenizer:
    """Open the snapshot that a spec or plan names. Raises DataError as HuggingFaceTokenizer does."""
    return HuggingFaceTokenizer(Path(HubTokenizer.location(source)))
