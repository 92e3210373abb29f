"""Texts of events, for lines of a log file and for lists on a screen."""

from attrs import frozen

from xtrain.records import events
from xtrain.records import training_events as training
from xtrain.records.lines import Event, as_object
from xtrain.text.units import brief, count, decimal, duration, perplexity, plural, share, size, took

# The first word of a line, where that is not the name of the event.
_WORDS: dict[type[Event], str] = {
    training.RunStartEvent: "run", training.SetupBeginEvent: "begins", training.HorizonEvent: "counted",
    training.SetupDoneEvent: "ready", training.GenerateEvent: "sample", training.MemorySnapshotEvent: "memory",
    events.RunEndEvent: "end",
}  # fmt: skip
# Events that belong to the run, and to none of its steps.
_OF_NO_STEP = (
    training.RunStartEvent, training.SetupBeginEvent, training.SetupEvent, training.DeviceEvent, training.DataEvent,
    training.HorizonEvent, training.SetupDoneEvent, training.TokeniseEvent, training.WeightsEvent,
    training.ReferenceEvent, events.RunEndEvent,
)  # fmt: skip


@frozen
class EventText:
    """Text of an event. at: `step 120`, empty without a step; body: one line; more: lines that do not fit in it;
    subject: the start of the body, such as a dataset or the kind of an alert."""

    word: str
    at: str
    body: str
    more: tuple[str, ...] = ()
    subject: str = ""


LONGEST_FIELD = 8
"""Most entries of a list or map that are shown; of longer ones, only their number is."""


def event_text(event: Event) -> tuple[EventText, ...]:
    """Return the texts of an event; empty for one without a name."""
    if not event.event:
        return ()
    word = _WORDS.get(type(event), event.event)
    at = "" if isinstance(event, _OF_NO_STEP) else f"step {or_dash(event.step)}"
    if isinstance(event, training.GenerateEvent):
        samples = enumerate(event.samples, start=1)
        head = f"/{len(event.samples)}  prompt "
        return tuple(EventText(word, at, f"{n}{head}{each.prompt!r}", _lines(each.text)) for n, each in samples)
    subject, rest = _subject_and_rest(event)
    first, *more = rest.strip().split("\n")
    more += _lines(event.traceback) if isinstance(event, events.FailureEvent) else ()
    gap = ": " if isinstance(event, events.SignalEvent | events.StopEvent | events.ControlEvent) else "  "
    return (EventText(word, at, gap.join(filter(None, (subject, first))), tuple(more), subject),)


def in_one_line(event: Event) -> str:
    """Return the text of an event without its kind and step."""
    first, *others = event_text(event) or (EventText("", "", ""),)
    return f"{first.body}  and {plural(len(others), 'more sample')}" if others else first.body


def measured(evaluation: training.EvalEvent) -> str:
    """Return `stdlib loss 1.4895 ppl 4.43`."""
    return _joined(evaluation.dataset, _measured(evaluation))


def _measured(evaluation: training.EvalEvent) -> str:
    return _joined(quality(evaluation), "averaged weights" if evaluation.weights == "averaged" else "")


def quality(evaluation: training.EvalEvent) -> str:
    """Return the figures of an evaluation: `loss 1.4895 ppl 4.43`.

    Other forms: `acc 41.2% norm 43.0%` for questions, `loss 1.4895 objective 0.6102 rewards/accuracy 0.6500` for
    another objective, `loss 1.4895 reward 0.8100` for scored answers.
    """
    if evaluation.acc is not None:
        return _joined(f"acc {share(evaluation.acc)}", f"norm {share(evaluation.acc_norm)}")
    if evaluation.reward is not None:
        return _joined(f"loss {decimal(evaluation.loss, 4)}", f"reward {decimal(evaluation.reward, 4)}")
    if evaluation.objective is not None:
        others = {"objective": evaluation.objective, **(evaluation.metrics or {})}
        return _joined(f"loss {decimal(evaluation.loss, 4)}", *(f"{n} {decimal(v, 4)}" for n, v in others.items()))
    ppl = perplexity(evaluation.loss)
    return _joined(f"loss {decimal(evaluation.loss, 4)}", "" if ppl is None else f"ppl {decimal(ppl, 2)}")


def failed(failure: events.FailureEvent) -> str:
    """Return the failed rank: `rank 3`."""
    return "a rank" if failure.rank is None else f"rank {failure.rank}"


def cause(failure: events.FailureEvent) -> str:
    """Return the error of a failure, after its code for `xtrain explain` if it has one."""
    return f"[{failure.code}] {failure.error}" if failure.code else failure.error


def or_dash(step: int | None) -> str:
    """Return a step as text; `–` if unknown."""
    return "–" if step is None else str(step)


def _subject_and_rest(event: Event) -> tuple[str, str]:
    """Return the subject of an event (empty if it has none) and the rest of its text."""
    match event:
        case events.SignalEvent() | events.StopEvent():
            return event.name, event.reason
        case events.ControlEvent():
            return f"{event.command} {event.state}", event.detail
        case events.AlertEvent():
            return event.kind, f"{'over: ' if event.state == 'cleared' else ''}{event.message}"
        case events.NotifyEvent():
            return event.kind, f"`{event.command}` {event.detail}"
        case training.PhaseEvent():
            return event.name, _phase(event)
        case training.WeightsEvent():
            return event.path, _read(event)
        case training.TokeniseEvent():
            return event.dataset, event.message
        case training.ReferenceEvent():
            return event.dataset, _referred(event)
        case events.FailureEvent():
            return failed(event), cause(event)
        case training.EvalEvent():
            tokens = "" if event.tokens is None else f"{count(event.tokens)} tokens"
            return event.dataset, _joined(_measured(event), tokens, took(event.seconds))
        case training.ExportEvent():
            weights = f"{'averaged ' if event.weights == 'averaged' else ''}{' and '.join(event.formats)}"
            return "", _joined(event.path, weights, _size(event.bytes), took(event.seconds))
        case training.CheckpointEvent() | training.ModelEvent():
            return "", _joined(event.path, _size(event.bytes), took(event.seconds))
        case _:
            return "", _body(event)


def _body(event: Event) -> str:
    match event:
        case training.RunStartEvent():
            ranks = f"{plural(event.world_size or 0, 'rank')} on {event.device or 'unknown devices'}"
            return _joined(
                event.name or event.run_id,
                f"attempt {event.attempt or 1}",
                ranks if event.world_size else "",
                f"{event.steps} steps" if event.steps else "unknown length",
                "" if event.resumed_step is None else f"resumed at step {event.resumed_step}",
            )
        case training.SetupBeginEvent():
            return event.node
        case training.SetupEvent():
            return _joined(f"{event.node:<28}  {took(event.seconds):>8}", event.detail)
        case training.DeviceEvent():
            threads = plural(event.threads, "thread") if event.threads else ""
            matmul = f"fp32 products {event.matmul}" if event.matmul else ""
            return _joined(event.device, threads, matmul, f"torch {event.torch}" if event.torch else "")
        case training.DataEvent():
            return _joined(*(f"{name} {plural(rows, 'row')}" for name, rows in event.rows.items()))
        case training.HorizonEvent():
            return _joined(
                "" if event.steps is None else plural(event.steps, "step"),
                "" if event.epoch_rows is None else f"{event.epoch_rows:,g} rows an epoch",
                f"stops at step {event.stop_at}" if event.stop_at else "",
                *(f"{name} from step {first + 1:,}" for name, first in event.phases.items() if first),
            )
        case training.ResumedEvent():  # with the state groups that are not simply restored
            others = (f"{name} {word}" for name, word in event.groups.items() if word not in ("read", "own"))
            return _joined(event.path, ", ".join(others))
        case training.SetupDoneEvent():
            return took(event.seconds)
        case training.EstimateEvent():
            left = f"about {duration(event.seconds_left)} for the remaining {plural(event.steps_left or 0, 'step')}"
            pace = f"{took(event.step_seconds)} a step on this machine, measured over "
            pace += plural(event.measured_steps or 0, "step")
            first = f", after {took(event.first_step_seconds)} for the first" if event.first_step_seconds else ""
            return f"{left}: {pace}{first}; evaluations and saves come on top"
        case events.PausedEvent():
            return f"for {took(event.seconds)}"
        case events.RequeueEvent():
            return f"Slurm was asked to start job {event.job} again"
        case training.NonFiniteEvent():
            return f"loss {decimal(event.loss, 4)}  grad_norm {decimal(event.grad_norm, 4)}"
        case training.RollbackEvent():
            time = "" if event.number is None else f", time {event.number} of {event.of}"
            rows = "" if event.rows_left_out is None else f"; {event.rows_left_out:,} rows left out"
            return f"from step {event.from_step} to {event.checkpoint}{time}{rows}"
        case events.RestartEvent():
            place = f"from step {event.step:,}" if event.step else "from the beginning"
            world = f" on {plural(event.world, 'rank')}" if event.world else ""
            of = f" of {event.of}" if event.of else ""
            number = "" if event.number is None else f"{event.number}{of}  "
            return f"{number}{event.reason}; continues {place}{world}"
        case events.ReplicasEvent():
            every = f"{len(event.taking_part)} of {or_dash(event.of)} groups take part"
            who = ", ".join(map(str, event.taking_part))
            changes = (("joined", event.joined), ("left", event.left))
            changed = (f"{word} {', '.join(map(str, groups))}" for word, groups in changes if groups)
            return _joined(f"{every}: {who}", *changed, f"{or_dash(event.rows)} rows a step")
        case events.ReplicaGroupEvent():
            number = f", start {event.number}" if event.state == "started" else ""
            return _joined(f"group {or_dash(event.group)} {event.state.replace('_', ' ')}{number}", event.reason)
        case training.SkippedEvent():
            return event.reason
        case events.WarningEvent():
            return event.message
        case training.ProfileEvent():
            last = "" if event.first == event.last else f" to {or_dash(event.last)}"
            return _joined(f"step{'s' if last else ''} {or_dash(event.first)}{last}", _written(event))
        case training.MemorySnapshotEvent():
            return _written(event)
        case training.LrSweepEvent():
            end = ", then the loss diverged" if event.diverged else ""
            rates = (("steepest descent", event.steepest), ("minimum/10", event.minimum_tenth))
            found = ", ".join(f"{name} {rate:.3g}" for name, rate in rates if rate is not None)
            return f"{found or 'the loss nowhere falls'}; {or_dash(event.points)} steps{end}"
        case training.HealthEvent():
            late = (
                "" if event.slowest is None else f"; rank {event.slowest} came last, after {brief(event.late_seconds)}"
            )
            return f"an all-reduce takes {brief(event.seconds)}{late}"
        case events.StuckEvent():
            names = ", ".join(map(str, event.ranks)) or "unknown"
            return _joined(
                f"{'rank' if len(event.ranks) < 2 else 'ranks'} {names} {event.state}".rstrip(),
                f"in {event.node}" if event.node else "",
                "" if event.seconds is None else f"for {took(event.seconds)}",
            )
        case events.RunEndEvent():
            loss = "" if event.loss is None else f"loss {decimal(event.loss, 4)}"
            seconds = "" if event.seconds is None else duration(event.seconds)
            return _joined(f"{event.status or 'ended'}  step {or_dash(event.step)}", loss, seconds)
        case _:  # an event without words of its own, such as one of a later version: its fields, long ones counted
            fields = as_object(event).items()
            return _joined(*(f"{key} {_field(value)}" for key, value in fields if key not in ("event", "time", "step")))


def _field(value: object) -> str:
    return str(len(value)) if isinstance(value, list | dict) and len(value) > LONGEST_FIELD else str(value)


def _read(event: training.WeightsEvent) -> str:
    """Return `1.2 GiB of 4.0 GiB`; once all ranks are done, their total size and time."""
    seconds, sizes = event.rank_seconds, event.rank_bytes
    if not sizes:
        return f"{size(event.done)} of {size(event.total)}"
    parts = [f"{size(sum(sizes))} in {took(max(seconds))}"]
    if len(sizes) > 1:
        parts.append(f"{_from_to(size(min(sizes)), size(max(sizes)))} a rank")
        times = _from_to(took(min(seconds)), took(max(seconds)))
        parts.append(f"{times}, rank {seconds.index(max(seconds))} the slowest")
    return _joined(*parts)


def _referred(event: training.ReferenceEvent) -> str:
    """Return `initial 120 of 900 rows`; `initial computed for 900 rows in 3.1 s`; `initial 900 rows from the cache`."""
    done, rows = count(event.done), count(event.rows)
    if not event.computed:
        said = f"{rows} rows from the cache"
    elif event.done == event.rows:
        said = f"computed for {rows} rows in {took(event.seconds)}"
    else:
        said = f"{done} of {rows} rows"
    return _joined(event.reference, said)


def _from_to(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _phase(event: training.PhaseEvent) -> str:
    """Return the mixture of a phase, the largest share first, and its learning-rate scale."""
    largest = sorted(event.shares.items(), key=lambda pair: -pair[1])
    rate = f"lr × {event.lr_scale:g}" if event.lr_scale not in (None, 1) else ""
    return _joined(", ".join(f"{name} {share:.1%}" for name, share in largest), rate)


def _written(event: training.ProfileEvent | training.MemorySnapshotEvent) -> str:
    """Return the number of ranks that wrote something, its path, size and time."""
    ranks = "" if event.ranks is None else plural(event.ranks, "rank")
    return _joined(ranks, event.path, _size(event.bytes), took(event.seconds), event.note)


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else size(num_bytes)


def _joined(*parts: str) -> str:
    return "  ".join(filter(None, parts))


def _lines(body: str) -> tuple[str, ...]:
    return tuple(line.rstrip() for line in body.strip("\n").split("\n")) if body.strip("\n") else ()
