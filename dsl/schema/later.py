"""Names the language keeps for things this version does not do: using one is an error that says just that."""

from typing import Final

from xtrain.dsl.schema.losses import Loss
from xtrain.dsl.schema.parallel import Pp

KINDS: Final = ()
ACTIONS: Final = ()
EVENTS: Final = ()
SOURCES: Final = ()
LINKS: Final = ()

# Settings, and words of settings that exist, by the class they belong to.
SETTINGS: Final[dict[type, tuple[str, ...]]] = {}
WORDS: Final[dict[tuple[type, str], tuple[str, ...]]] = {
    (Pp, "schedule"): ("dual_pipe",),
    (Loss, "kind"): ("kl",),
}
