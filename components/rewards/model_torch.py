"""`rollout.score` of a reward model."""

from xtrain.runtime.ops import op
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.rollout.row_ranks import RowRanks
from xtrain.runtime.rollout.scorer import Scorer
from xtrain.runtime.rollout.scoring import scoring
from xtrain.runtime.state import Rank, StepCall


@op("rollout.score.model")
def score(rank: Rank, meshes: Meshes, scorer: Scorer) -> StepCall:
    """What the model gives the prompt with each completion."""
    return scoring(scorer.rewards, RowRanks.of(rank, meshes))
