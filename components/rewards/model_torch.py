"""`rollout.score` of a reward model."""

from xtrain.runtime.ops import op
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.rollout.row_ranks import RowRanks
from xtrain.runtime.rollout.scorer import Scorer
from xtrain.runtime.rollout.scoring import scoring
from xtrain.runtime.state import Rank
from xtrain.runtime.step_state import StepCall


@op("rollout.score.model")
def score(rank: Rank, meshes: Meshes, scorer: Scorer) -> StepCall:
    """Score each completion, after its prompt, with the reward model."""
    return scoring(scorer.rewards, RowRanks.of(rank, meshes))
