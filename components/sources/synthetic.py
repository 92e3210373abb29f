"""`synthetic(…)`: generated documents."""

from collections.abc import Mapping
from typing import Any

import attrs

from xtrain.contracts.data import PlannedSource
from xtrain.dsl.schema.data_components import SOURCES, Source
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, not_negative, seed_range, setting
from xtrain.lazy_attrs import frozen


@SOURCES.register()
@frozen
class Synthetic(PlannedSource):
    """`synthetic(…)`: random documents of a made-up language, for tests without data.

    Its words follow each other by learnable rules, the same for every seed; a seed selects the documents.
    """

    documents: int = setting("number of documents", default=10_000, check=at_least(1))
    length: int = setting("mean length of a document, in tokens", default=512, check=at_least(3))
    spread: float = setting(
        "standard deviation of the logarithm of the lengths; 0: all have the same length",
        default=0.5,
        check=not_negative,
    )
    seed: int | Auto = setting("seed of the documents; auto: the experiment's seed", default=AUTO, check=seed_range)

    kind = "synthetic"
    former_options = ("documents", "length", "spread", "seed")

    def options(self, seed: int) -> dict[str, Any]:
        own = seed if isinstance(self.seed, Auto) else self.seed
        return {"documents": self.documents, "length": self.length, "spread": self.spread, "seed": own}

    def does(self) -> str:
        return f"{self.documents:,} synthetic documents"

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        options = args["options"]
        return f"{options['documents']:,} synthetic documents of about {options['length']:,} tokens"

    def identity(self, seed: int) -> Any:
        """Return the identity; the default seed written out is the same experiment."""
        own = attrs.evolve(self, seed=AUTO) if self.seed == seed else self
        return Source.identity(own, seed)
