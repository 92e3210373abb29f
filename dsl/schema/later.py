"""Reserved names of features that this version does not have; a spec that uses one gets an error that says so."""

from typing import Final

from xtrain.dsl.schema.losses import Loss
from xtrain.dsl.schema.parallel import Pp

KINDS: Final = ()
ACTIONS: Final = ()
EVENTS: Final = ()
SOURCES: Final = ()
LINKS: Final = ()

# Settings, and words of existing settings, by class.
SETTINGS: Final[dict[type, tuple[str, ...]]] = {}
WORDS: Final[dict[tuple[type, str], tuple[str, ...]]] = {
    (Pp, "schedule"): ("dual_pipe",),
    (Loss, "kind"): ("kl",),
}
