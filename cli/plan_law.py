"""`xtrain plan --law FILE`: the loss of a run, predicted by a scaling law."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtrain.planner.plan import Plan
    from xtrain.records.law import ScalingLaw

FAR = 1.5
"""Ratio to the law's fitted range from which a prediction counts as an extrapolation."""


def with_prediction(text: str, plan: "Plan", law: "ScalingLaw", form: str) -> str:
    """Return the plan's text followed by the law's prediction. form: `text` or `json`."""
    if form == "json":
        return json.dumps({**json.loads(text), "predicted": prediction(plan, law)}, indent=2) + "\n"
    return text.rstrip("\n") + "\n\n" + _lines(plan, law)


def prediction(plan: "Plan", law: "ScalingLaw") -> dict[str, Any] | None:
    """Return the predicted loss; None while the number of tokens is unknown."""
    parameters, tokens = plan.parameters.active, plan.timeline.tokens
    if tokens is None:
        return None
    loss, interval = law.predicted(parameters, tokens)
    return {
        "metric": law.metric,
        "loss": loss,
        "interval": list(interval),
        "parameters": parameters,
        "tokens": tokens,
        "runs": law.runs,
        "beyond": law.beyond(parameters, tokens),
    }


def _lines(plan: "Plan", law: "ScalingLaw") -> str:
    from xtrain.planner.units import count_text
    from xtrain.records.law import SHARE

    head = f"PREDICTED  by a law of {law.runs} runs\n"
    found = prediction(plan, law)
    if found is None:
        return f"{head}  {law.metric}  unknown until the data has been counted\n"
    low, high = found["interval"]
    size, tokens = count_text(found["parameters"]), count_text(found["tokens"])
    lines = [f"  {law.metric}  {found['loss']:.4f}  {low:.4f} to {high:.4f} in {SHARE:.0%} of samples"]
    lines += [f"  for {size} parameters that a token uses, {tokens} tokens"]
    if found["beyond"] >= FAR:
        lines += [
            f"  {found['beyond']:.3g} times beyond the runs of the law: the interval says nothing of its form there"
        ]
    return head + "\n".join(lines) + "\n"
