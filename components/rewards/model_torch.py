"""`rollout.score` of a reward model."""

from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.batch import StepCall
from xtrain.runtime.sampling.sampler import RowRanks
from xtrain.runtime.sampling.scoring import Scorer, scoring


@op("rollout.score.model")
def score(rank: Rank, meshes: Meshes, scorer: Scorer) -> StepCall:
    """Score each completion, after its prompt, with the reward model."""
    return scoring(scorer.rewards, RowRanks.of(rank, meshes))
