"""Whether a run is alive, as far as its files tell: a run that was killed says nothing of it."""

from typing import Literal

from attrs import frozen

Phase = Literal["waiting", "starting", "training", "paused", "ended", "lost"]


@frozen(kw_only=True)
class Life:
    """What has become of a run.

    state: `waiting` (no record yet), `starting` (set-up), `training`, `paused` (it waits for `resume`), `ended` (it
    has said so itself), `lost` (its processes are gone, or not heard of, and it has not said that it ends). status: of
    an ended run, as in `run_end`: `done`, `complete`, `stopped`, `interrupted`, `failed`. since: seconds since 1970,
    from when; why: what that is concluded from, in words.
    """

    state: Phase = "waiting"
    status: str = ""
    since: float | None = None
    why: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state in ("ended", "lost")

    @property
    def in_words(self) -> str:
        """One word for a headline: `training`, `done`, `lost`."""
        return self.status or self.state
