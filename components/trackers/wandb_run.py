"""`setup.log.wandb`: records for Weights & Biases. All files are in the run's folder, and nothing waits for the
network."""

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from xtrain.lazy_attrs import define
from xtrain.records.lines import Event, as_object
from xtrain.records.metrics import StepMetrics
from xtrain.records.training_events import GenerateEvent, RollbackEvent
from xtrain.runtime.base.ops import op
from xtrain.runtime.observe.records import Trackers

# Seconds for W&B to answer at the start of a run, and to receive the rest at its end.
INIT_SECONDS: Final = 60.0
FINISH_SECONDS: Final = 30.0
# W&B's maximum of histogram bars.
MOST_BARS: Final = 512
# Exit codes of a successful end: finished, and stopped but resumable.
ENDED_WELL: Final = (0, 75)


@op("setup.log.wandb")
def log_to_wandb(
    trackers: Trackers,
    project: str,
    entity: str | None,
    name: str | None,
    group: str | None,
    tags: list[str],
    notes: str | None,
    mode: str,
) -> None:
    """Log records to Weights & Biases, under the same W&B run for all starts of this run."""
    chosen = {"project": project, "entity": entity, "name": name, "group": group, "tags": tags, "notes": notes}
    trackers.begin(
        lambda run: WandbWriter(
            directory=run.directory,
            mode=mode,
            chosen=chosen,
            config=run.settings,
            rolled_back=run.rolled_back,
            warn=run.warn,
        )
    )


@define(eq=False, kw_only=True)
class WandbWriter:
    """A `RecordWriter` for W&B. chosen: the settings of `log.wandb` except `mode`. config: all settings of the run.
    rolled_back: steps undone by rollbacks so far. warn: called if the run is kept offline because W&B is
    unreachable.

    W&B cannot remove rows and needs them in order, so a repeated step gets a later row; charts use the row's `step`.
    """

    directory: Path
    mode: str
    chosen: dict[str, Any]
    config: Mapping[str, Any]
    rolled_back: int
    warn: Callable[[str], None]
    name: str = "W&B"
    seconds: float = INIT_SECONDS + FINISH_SECONDS
    local: bool = False
    _library: Any = None
    _run: Any = None

    def begin(self) -> None:
        folder = self.directory / "wandb"
        folder.mkdir(exist_ok=True)
        # Keep the library's caches in the run's folder and disable its error reports.
        for name in ("CACHE", "DATA"):
            os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / name.lower()))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._library = import_module("wandb")
        try:
            self._run = self._opened(self.mode)
        except Exception as error:
            if self.mode == "offline":
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            instead = f"records are saved in {folder}; to send them later: `wandb sync {folder}/offline-run-*`"
            self.warn(f"W&B is not available online ({reason}): {instead}")
            self._library.teardown()  # otherwise the run that could not start blocks later ones
            self._run = self._opened("offline")
        self._run.define_metric("*", step_metric="step")
        for file in ("spec.xtrain", "plan.json"):
            if (self.directory / file).exists():
                self._run.save(str(self.directory / file), base_path=str(self.directory), policy="now")

    def metric(self, record: StepMetrics) -> None:
        values: dict[str, Any] = {"step": record.step}
        for key, value in as_object(record).items():
            if isinstance(value, list):
                if 0 < len(value) <= MOST_BARS:
                    values[key] = self._library.Histogram(np_histogram=(value, list(range(len(value) + 1))))
            elif key != "time":
                values[key] = value
        self._log(values)

    def event(self, record: Event) -> None:
        if isinstance(record, RollbackEvent):
            self.rolled_back += (record.from_step or 0) - (record.step or 0)
        elif isinstance(record, GenerateEvent):
            rows = [[each.prompt, each.text] for each in record.samples]
            table = self._library.Table(columns=["prompt", "text"], data=rows)
            self._log({"step": record.step, "generate": table})

    def rest(self, *, must: bool) -> None:
        """Do nothing: W&B writes in a process of its own."""

    def end(self, exit_code: int) -> None:
        self._run.finish(exit_code=0 if exit_code in ENDED_WELL else exit_code)
        self._library.teardown()

    def _log(self, values: dict[str, Any]) -> None:
        self._run.log(values, step=values["step"] + self.rolled_back)

    def _opened(self, mode: str) -> Any:
        """Start or resume the W&B run and return it."""
        # Write eagerly where the library supports it: buffered records are lost with a killed run.
        known = getattr(self._library.Settings, "model_fields", {})
        eager = {name: 1.0 for name in ("x_transaction_log_flush_interval",) if name in known}
        settings = self._library.Settings(
            **eager,
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            login_timeout=1.0,  # no user can answer
        )
        name = self.chosen["name"] or f"{self.config['experiment']['name']} {self.directory.name}"
        return self._library.init(
            **{**self.chosen, "name": name},
            id=self._id(),
            resume="allow",
            mode=mode,
            dir=str(self.directory),
            config=self.config,
            allow_val_change=True,
            settings=settings,
        )

    def _id(self) -> str:
        """Return the W&B run id, which stays the same across starts as long as the folder exists."""
        path = self.directory / "wandb" / "run_id"
        with suppress(FileNotFoundError):
            if known := path.read_text().strip():
                return known
        new = secrets.token_hex(8)
        path.write_text(f"{new}\n")
        return new
