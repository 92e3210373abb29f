"""xtrain: declare a training experiment, review its execution plan, run exactly that plan."""

from typing import TYPE_CHECKING, Any

from xtrain.version import __version__ as __version__

if TYPE_CHECKING:
    from xtrain.api.environments import OpenEnvEpisode as OpenEnvEpisode
    from xtrain.api.runs import Run as Run
    from xtrain.api.runs import RunFailed as RunFailed
    from xtrain.api.runs import open_run as open_run
    from xtrain.api.specs import LoadedSpec as LoadedSpec
    from xtrain.api.specs import ReviewedPlan as ReviewedPlan
    from xtrain.api.specs import SpecWarning as SpecWarning
    from xtrain.api.specs import load as load
    from xtrain.blocks.attention import AttentionLayer as AttentionLayer
    from xtrain.blocks.block import Chain as Chain
    from xtrain.blocks.block import FactorLayer as FactorLayer
    from xtrain.blocks.block import NormLayer as NormLayer
    from xtrain.blocks.block import Residual as Residual
    from xtrain.blocks.block import Sum as Sum
    from xtrain.blocks.block import post_norm as post_norm
    from xtrain.blocks.block import pre_norm as pre_norm
    from xtrain.blocks.block import sandwich_norm as sandwich_norm
    from xtrain.blocks.feed_forward import ExpertsLayer as ExpertsLayer
    from xtrain.blocks.feed_forward import SwiGLULayer as SwiGLULayer
    from xtrain.dsl.diagnostics.diagnostic import SpecErrors as SpecErrors
    from xtrain.dsl.schema.setting import at_least as at_least
    from xtrain.dsl.schema.setting import between as between
    from xtrain.dsl.schema.setting import not_negative as not_negative
    from xtrain.dsl.schema.setting import positive as positive
    from xtrain.dsl.schema.setting import proper_fraction as proper_fraction
    from xtrain.plan.serialise import PlanError as PlanError
    from xtrain.runtime.base.errors import EnvironmentFault as EnvironmentFault
    from xtrain.runtime.base.part_decorators import action as action
    from xtrain.runtime.base.part_decorators import collator as collator
    from xtrain.runtime.base.part_decorators import environment as environment
    from xtrain.runtime.base.part_decorators import epoch as epoch
    from xtrain.runtime.base.part_decorators import evaluation_step as evaluation_step
    from xtrain.runtime.base.part_decorators import family as family
    from xtrain.runtime.base.part_decorators import hook as hook
    from xtrain.runtime.base.part_decorators import layer as layer
    from xtrain.runtime.base.part_decorators import loss as loss
    from xtrain.runtime.base.part_decorators import optimizer as optimizer
    from xtrain.runtime.base.part_decorators import reward as reward
    from xtrain.runtime.base.part_decorators import schedule as schedule
    from xtrain.runtime.base.part_decorators import source as source
    from xtrain.runtime.base.part_decorators import state as state
    from xtrain.runtime.base.part_decorators import step as step
    from xtrain.runtime.base.part_decorators import tool as tool
    from xtrain.runtime.base.part_decorators import tracker as tracker
    from xtrain.runtime.base.part_decorators import train as train
    from xtrain.runtime.base.part_decorators import weight as weight
    from xtrain.runtime.feed.microbatch import IGNORE_INDEX as IGNORE_INDEX
    from xtrain.runtime.feed.microbatch import Microbatch as Microbatch
    from xtrain.runtime.feed.microbatch import Sample as Sample
    from xtrain.runtime.loop.hooks import RunContext as RunContext
    from xtrain.runtime.loop.hooks import StepContext as StepContext
    from xtrain.runtime.loop.own_loops import EpochContext as EpochContext
    from xtrain.runtime.loop.own_loops import TrainContext as TrainContext
    from xtrain.runtime.nn.fused import rms_norm as rms_norm
    from xtrain.runtime.observe.records import TrackerContext as TrackerContext

# What is used from Python, and what parts of a user's own are written with → its module. Loaded when asked for: a
# file of sources needs no torch.
_OFFERED = {
    **dict.fromkeys(("LoadedSpec", "ReviewedPlan", "SpecWarning", "load"), "xtrain.api.specs"),
    **dict.fromkeys(("Run", "RunFailed", "open_run"), "xtrain.api.runs"),
    "OpenEnvEpisode": "xtrain.api.environments",
    "SpecErrors": "xtrain.dsl.diagnostics.diagnostic",
    "PlanError": "xtrain.plan.serialise",
    "EnvironmentFault": "xtrain.runtime.base.errors",
    "source": "xtrain.runtime.base.part_decorators",
    "action": "xtrain.runtime.base.part_decorators",
    "collator": "xtrain.runtime.base.part_decorators",
    "family": "xtrain.runtime.base.part_decorators",
    "layer": "xtrain.runtime.base.part_decorators",
    "weight": "xtrain.runtime.base.part_decorators",
    "state": "xtrain.runtime.base.part_decorators",
    "loss": "xtrain.runtime.base.part_decorators",
    "hook": "xtrain.runtime.base.part_decorators",
    "optimizer": "xtrain.runtime.base.part_decorators",
    "evaluation_step": "xtrain.runtime.base.part_decorators",
    **dict.fromkeys(("train", "epoch"), "xtrain.runtime.base.part_decorators"),
    "reward": "xtrain.runtime.base.part_decorators",
    **dict.fromkeys(("environment", "tool"), "xtrain.runtime.base.part_decorators"),
    "schedule": "xtrain.runtime.base.part_decorators",
    "step": "xtrain.runtime.base.part_decorators",
    "tracker": "xtrain.runtime.base.part_decorators",
    "RunContext": "xtrain.runtime.loop.hooks",
    "StepContext": "xtrain.runtime.loop.hooks",
    **dict.fromkeys(("TrainContext", "EpochContext"), "xtrain.runtime.loop.own_loops"),
    "TrackerContext": "xtrain.runtime.observe.records",
    "Sample": "xtrain.runtime.feed.microbatch",
    "Microbatch": "xtrain.runtime.feed.microbatch",
    "IGNORE_INDEX": "xtrain.runtime.feed.microbatch",
    "rms_norm": "xtrain.runtime.nn.fused",
    **dict.fromkeys(
        ("at_least", "between", "positive", "not_negative", "proper_fraction"), "xtrain.dsl.schema.setting"
    ),
    "AttentionLayer": "xtrain.blocks.attention",
    "ExpertsLayer": "xtrain.blocks.feed_forward",
    "SwiGLULayer": "xtrain.blocks.feed_forward",
    **dict.fromkeys(("FactorLayer", "NormLayer", "post_norm", "pre_norm", "sandwich_norm"), "xtrain.blocks.block"),
    **dict.fromkeys(("Chain", "Residual", "Sum"), "xtrain.blocks.block"),
}


if not TYPE_CHECKING:  # with it, a type checker would let every name pass

    def __getattr__(name: str) -> Any:
        if name not in _OFFERED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_OFFERED[name]), name)
