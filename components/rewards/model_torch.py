"""`rollout.score` of a reward model."""

from ...runtime.ops import op
from ...runtime.parallel.mesh import Meshes
from ...runtime.rollout.row_ranks import RowRanks
from ...runtime.rollout.scorer import Scorer
from ...runtime.rollout.scoring import scoring
from ...runtime.state import Rank, StepCall


@op("rollout.score.model")
def score(rank: Rank, meshes: Meshes, scorer: Scorer) -> StepCall:
    """What the model gives the prompt with each completion."""
    return scoring(scorer.rewards, RowRanks.of(rank, meshes))
