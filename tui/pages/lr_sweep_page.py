"""What a search for a learning rate has found: a table, the loss over the rate, and the suggestions."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from xtrain.tui.curves.canvas import Glyphs
from xtrain.tui.curves.curve import Curve, Line
from xtrain.tui.curves.drawing import draw
from xtrain.tui.curves.viewport import Viewport

MOST_ROWS: Final = 12
HEIGHT: Final = 16
# Losses above this multiple of the first are not drawn: the others would be a flat line.
MOST_DRAWN: Final = 1.5
SUGGESTED: Final = {
    "steepest": "steepest descent: arg min of d loss / d log(rate)",
    "minimum_tenth": "minimum/10: a tenth of the rate with the least loss",
}


def lr_sweep_page(found: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[str]:
    """Return the lines of a learning-rate sweep. found: the content of `lr_sweep.json`."""
    rates, losses, smoothed = (found[name] for name in ("lr", "loss", "smoothed"))
    if not rates:
        return ["the loss of the first step is not finite: begin with a smaller rate"]
    places = sorted({round(place) for place in np.linspace(0, len(rates) - 1, MOST_ROWS)})
    lines = [f"{'step':>6}  {'rate':>9}  {'loss':>9}  {'smoothed':>9}"]
    lines += [f"{at + 1:>6}  {rates[at]:>9.3g}  {losses[at]:>9.4f}  {smoothed[at]:>9.4f}" for at in places]
    x = np.log10(np.array(rates))
    highest = MOST_DRAWN * smoothed[0]
    drawn = [(name, np.array(values)) for name, values in (("smoothed", smoothed), ("loss", losses))]
    curves = [Curve(Line(name, x, np.where(y > highest, np.nan, y), dim=name == "loss")) for name, y in drawn]
    drawing = draw(
        curves,
        Viewport(),
        width,
        HEIGHT,
        title="loss over log10 of the rate",
        x_label="",
        x_unit="number",
        glyphs=glyphs,
    )
    lines += ["", *("".join(text for text, _ in row).rstrip() for row in drawing.rows), ""]
    end = "the loss diverged" if found.get("diverged") else "the sweep ended"
    lines.append(f"{end} after {len(rates)} steps, at a rate of {rates[-1]:.3g}")
    if not any(found.get(name) for name in SUGGESTED):
        return [*lines, "the loss nowhere falls: there is nothing to suggest; use more steps, or a smaller first rate"]
    shown = ((found.get(name), meaning) for name, meaning in SUGGESTED.items())
    return [*lines, *(f"  {rate:<9.3g}  {meaning}" for rate, meaning in shown if rate and math.isfinite(rate))]
