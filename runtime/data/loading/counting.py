"""How many rows the data of a plan has, where that is known without tokenising or packing any. Without torch."""

from pathlib import Path
from typing import Final

from xtrain.planner.plan import Counted, Node, Plan
from xtrain.runtime.data.documents.encoder import DocumentEncoder
from xtrain.runtime.data.documents.tokenizers import TextTokenizer, load_tokenizer
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.loading.prepared import cache_of, rows_there, source_of
from xtrain.runtime.data.stores.digests import FileDigests
from xtrain.runtime.data.tokenising.build import INDEX, identify

# Of files whose content is not remembered, so much is read to know whether they are those of a store: in a moment.
MOST_READ: Final = 1 << 26


def counted_rows(plan: Plan) -> Counted | None:
    """The training rows of every dataset of a plan; None unless all of them are packed in the cache already.

    Where something is wrong with the data they are not counted: whoever reads it says so.
    """
    cache = cache_of(plan) / "tokens"
    if not cache.is_dir():
        return None
    rows, stores = {}, {}
    try:
        tokenizer = load_tokenizer(plan.node("setup.tokenizer").args["source"], Path.cwd())
        for name in plan.node("setup.loader").args["datasets"]:
            found = _rows(plan, plan.node(f"setup.data.{name}"), tokenizer, cache)
            if found is None:
                return None
            rows[name], stores[name] = found
    except DataError:
        return None
    return Counted(rows=rows, stores=stores) if all(rows.values()) else None


def _rows(plan: Plan, node: Node, tokenizer: TextTokenizer, cache: Path) -> tuple[int, str] | None:
    """(rows, key of the store) of a dataset."""
    source = source_of(plan, node, tokenizer)
    # What comes from elsewhere would be fetched to be known.
    if source.fetched is not None:
        return None
    if FileDigests(cache / INDEX).unread_bytes(source.files) > MOST_READ:
        return None
    identity = identify(source, DocumentEncoder(tokenizer, node.args["reads"]), cache)
    count = rows_there(plan, node, identity.names)
    return None if count is None else (count, identity.key)
