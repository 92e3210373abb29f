"""How the dashboard looks: dark, light, and one for terminals and eyes that need contrast."""

from textual.theme import Theme

DARK = Theme(
    name="dark",
    primary="#7aa2f7",
    secondary="#9d7cd8",
    accent="#e0af68",
    success="#73c991",
    warning="#e5c07b",
    error="#f7768e",
    foreground="#d5d9e0",
    background="#15171c",
    surface="#1c1f26",
    panel="#262a33",
)
LIGHT = Theme(
    name="light",
    primary="#0b57d0",
    secondary="#6a3fb5",
    accent="#8a5300",
    success="#146c2e",
    warning="#8a5300",
    error="#b3261e",
    foreground="#1b1c1f",
    background="#fbfbfd",
    surface="#f1f2f5",
    panel="#e2e4ea",
    dark=False,
)
# White on black, and one hue each for good and bad; nothing is dimmed.
CONTRAST = Theme(
    name="contrast",
    primary="#ffffff",
    secondary="#ffffff",
    accent="#ffff00",
    success="#00ff5f",
    warning="#ffff00",
    error="#ff5f5f",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#262626",
    text_alpha=1.0,
)
THEMES = (DARK, LIGHT, CONTRAST)


def after(name: str) -> str:
    """Return the name of the theme that follows `name`."""
    names = [theme.name for theme in THEMES]
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]
