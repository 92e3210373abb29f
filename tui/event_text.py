"""What each event says, in words: the same for a line of a log file and for a list on a screen."""

from collections.abc import Callable, Iterator

from attrs import frozen

from .events import (
    Checkpoint,
    Evaluation,
    Failure,
    Health,
    PhaseBegin,
    Restart,
    Rollback,
    RunEnd,
    RunStart,
    Sample,
    text,
    whole,
)
from .raised import Raised, is_cleared
from .tail import Record
from .words import count, decimal, duration, number, perplexity, plural, size, took


@frozen
class EventText:
    """One thing that is said. at: `step 120`, empty where it belongs to none; body: what it says, in one line; more:
    what does not fit one."""

    word: str
    at: str
    body: str
    more: tuple[str, ...] = ()


def event_text(record: Record) -> tuple[EventText, ...]:
    """What an event says; nothing for one of no kind."""
    event = text(record.get("event"))
    return tuple(_TELLERS.get(event, _unknown)(record)) if event else ()


def in_one_line(record: Record) -> str:
    """What an event says beside its kind and its step."""
    first, *others = event_text(record) or (EventText("", "", ""),)
    return f"{first.body}  and {plural(len(others), 'more sample')}" if others else first.body


def measured(evaluation: Evaluation) -> str:
    """`stdlib  loss 1.4895  ppl 4.43`."""
    parts = [evaluation.dataset, f"loss {decimal(evaluation.loss, 4)}"]
    if (ppl := perplexity(evaluation.loss)) is not None:
        parts.append(f"ppl {decimal(ppl, 2)}")
    if evaluation.averaged:
        parts.append("averaged weights")
    return "  ".join(parts)


def or_dash(step: int | None) -> str:
    """A step, or what stands for one that is not known."""
    return "–" if step is None else str(step)


def _run_start(record: Record) -> Iterator[EventText]:
    start = RunStart.of(record)
    parts = [start.name or start.run_id, f"attempt {start.attempt}"]
    if start.world_size:
        parts.append(f"{plural(start.world_size, 'rank')} on {start.device or 'unknown devices'}")
    parts.append(f"{start.steps} steps" if start.steps else "unknown length")
    if start.resumed_step is not None:
        parts.append(f"resumed at step {start.resumed_step}")
    yield EventText("run", "", "  ".join(parts))


def _setup_begin(record: Record) -> Iterator[EventText]:
    yield EventText("begins", "", text(record.get("node")))


def _setup(record: Record) -> Iterator[EventText]:
    line = f"{text(record.get('node')):<28}  {took(number(record.get('seconds'))):>8}"
    detail = text(record.get("detail"))
    yield EventText("setup", "", f"{line}  {detail}" if detail else line)


def _device(record: Record) -> Iterator[EventText]:
    parts = [text(record.get("device"))]
    threads, torch = whole(record.get("threads")), text(record.get("torch"))
    parts += [plural(threads, "thread")] if threads else []
    parts += [f"fp32 products {text(record.get('matmul'))}"] if record.get("matmul") else []
    parts += [f"torch {torch}"] if torch else []
    yield from _headed("device", "", "", "  ".join(parts))


def _data(record: Record) -> Iterator[EventText]:
    """`code 12,345 rows  drills 400 rows`."""
    rows = record.get("rows")
    known = rows.items() if isinstance(rows, dict) else ()
    parts = [f"{name} {plural(found, 'row')}" for name, each in known if (found := whole(each)) is not None]
    yield from _headed("data", "", "", "  ".join(parts))


def _horizon(record: Record) -> Iterator[EventText]:
    """`17 steps, 33 rows an epoch`."""
    parts = [f"{name} {amount}" for name, amount in (("stops at step", record.get("stop_at")),) if amount]
    steps, rows = whole(record.get("steps")), number(record.get("epoch_rows"))
    parts.insert(0, "  ".join(filter(None, (plural(steps, "step") if steps is not None else "",
                                            f"{rows:,g} rows an epoch" if rows is not None else ""))))  # fmt: skip
    firsts = record.get("phases")
    later = firsts.items() if isinstance(firsts, dict) else ()
    parts += [f"{name} from step {first + 1:,}" for name, each in later if (first := whole(each))]
    yield from _headed("counted", "", "", "  ".join(parts))


def _setup_done(record: Record) -> Iterator[EventText]:
    yield EventText("ready", "", took(number(record.get("seconds"))))


def _estimate(record: Record) -> Iterator[EventText]:
    """`about 4m43s for the 593 steps that are left`, and what that was measured on."""
    steps, measured = whole(record.get("steps_left")), whole(record.get("measured_steps"))
    left = f"about {duration(number(record.get('seconds_left')))} for the {plural(steps or 0, 'step')} that are left"
    pace = f"{took(number(record.get('step_seconds')))} a step on this machine"
    pace += f", measured over {plural(measured or 0, 'step')}"
    first = f", after {took(seconds)} for the first" if (seconds := number(record.get("first_step_seconds"))) else ""
    yield EventText("estimate", _at(record), f"{left}: {pace}{first}; evaluations and saves come on top")


def _eval(record: Record) -> Iterator[EventText]:
    evaluation = Evaluation.of(record)
    parts = [measured(evaluation)]
    if evaluation.tokens is not None:
        parts.append(f"{count(evaluation.tokens)} tokens")
    parts.append(took(evaluation.seconds))
    yield EventText("eval", _at(record), "  ".join(parts))


def _generate(record: Record) -> Iterator[EventText]:
    samples = Sample.all_of(record)
    for index, sample in enumerate(samples, start=1):
        yield EventText("sample", _at(record), f"{index}/{len(samples)}  prompt {sample.prompt!r}", _lines(sample.text))


def _checkpoint(record: Record) -> Iterator[EventText]:
    """A full state, or the weights alone: the event has the name of what was saved."""
    saved = Checkpoint.of(record)
    parts = [saved.path]
    if saved.num_bytes is not None:
        parts.append(size(saved.num_bytes))
    parts.append(took(saved.seconds))
    yield EventText(text(record.get("event")), _at(record), "  ".join(parts))


def _signal(record: Record) -> Iterator[EventText]:
    reason = f": {said}" if (said := text(record.get("reason"))) else ""
    yield EventText("signal", _at(record), f"{text(record.get('name'))}{reason}")


def _stop(record: Record) -> Iterator[EventText]:
    yield EventText("stop", _at(record), f"{text(record.get('name'))}: {text(record.get('reason'))}")


def _control(record: Record) -> Iterator[EventText]:
    detail = f": {said}" if (said := text(record.get("detail"))) else ""
    yield EventText("control", _at(record), f"{text(record.get('command'))} {text(record.get('state'))}{detail}")


def _paused(record: Record) -> Iterator[EventText]:
    yield EventText("paused", _at(record), f"for {took(number(record.get('seconds')))}")


def _requeue(record: Record) -> Iterator[EventText]:
    yield EventText("requeue", _at(record), f"Slurm was asked to start job {text(record.get('job'))} again")


def _nonfinite(record: Record) -> Iterator[EventText]:
    loss, norm = (decimal(number(record.get(key)), 4) for key in ("loss", "grad_norm"))
    yield EventText("nonfinite", _at(record), f"loss {loss}  grad_norm {norm}")


def _rollback(record: Record) -> Iterator[EventText]:
    yield EventText("rollback", _at(record), Rollback.of(record).in_words)


def _resumed(record: Record) -> Iterator[EventText]:
    """With the groups of the state that do not simply go on."""
    groups = record.get("groups")
    found = groups.items() if isinstance(groups, dict) else ()
    others = ", ".join(f"{name} {word}" for name, word in found if word not in ("read", "own"))
    body = "  ".join(filter(None, (text(record.get("path")), others)))
    yield from _headed("resumed", _at(record), "", body)


def _restart(record: Record) -> Iterator[EventText]:
    yield from _headed("restart", _at(record), "", Restart.of_record(record).in_words)


def _skipped(record: Record) -> Iterator[EventText]:
    yield from _headed("skipped", _at(record), "", text(record.get("reason")))


def _warning(record: Record) -> Iterator[EventText]:
    yield from _headed("warning", _at(record), "", text(record.get("message")))


def _profile(record: Record) -> Iterator[EventText]:
    first, last = whole(record.get("first")), whole(record.get("last"))
    steps = f"step {or_dash(first)}" if first == last else f"steps {or_dash(first)} to {or_dash(last)}"
    yield EventText("profile", _at(record), "  ".join((steps, *_looked_at(record))))


def _memory_snapshot(record: Record) -> Iterator[EventText]:
    yield EventText("memory", _at(record), "  ".join(_looked_at(record)))


def _looked_at(record: Record) -> Iterator[str]:
    """Of how many ranks something was written, where it lies, and how it went."""
    if (ranks := whole(record.get("ranks"))) is not None:
        yield plural(ranks, "rank")
    yield text(record.get("path"))
    if (num_bytes := number(record.get("bytes"))) is not None:
        yield size(num_bytes)
    yield took(number(record.get("seconds")))
    if note := text(record.get("note")):
        yield note


def _alert(record: Record) -> Iterator[EventText]:
    alert = Raised.of(record)
    over = "over: " if is_cleared(record) else ""
    yield from _headed("alert", _at(record), alert.kind, over + alert.message)


def _notify(record: Record) -> Iterator[EventText]:
    what = f"`{text(record.get('command'))}` {text(record.get('detail'))}"
    yield from _headed("notify", _at(record), text(record.get("kind")), what)


def _phase(record: Record) -> Iterator[EventText]:
    phase = PhaseBegin.of(record)
    yield EventText("phase", _at(record), f"{phase.name}  {phase.in_words}".rstrip())


def _health(record: Record) -> Iterator[EventText]:
    yield EventText("health", _at(record), Health.of(record).in_words)


def _stuck(record: Record) -> Iterator[EventText]:
    """`ranks 1, 3 frozen  in step.forward_backward  for 62.0 s`."""
    ranks = record.get("ranks")
    names = ", ".join(map(text, ranks)) if isinstance(ranks, list) and ranks else "unknown"
    parts = [f"{'rank' if ',' not in names else 'ranks'} {names} {text(record.get('state'))}".rstrip()]
    parts += [f"in {node}"] if (node := text(record.get("node"))) else []
    seconds = number(record.get("seconds"))
    parts += [f"for {took(seconds)}"] if seconds is not None else []
    yield EventText("stuck", _at(record), "  ".join(parts))


def _tokenise(record: Record) -> Iterator[EventText]:
    yield from _headed("tokenise", "", text(record.get("dataset")), text(record.get("message")))


def _failure(record: Record) -> Iterator[EventText]:
    failure = Failure.of(record)
    for said in _headed("failure", f"step {or_dash(failure.step)}", failure.who, failure.message):
        yield EventText(said.word, said.at, said.body, (*said.more, *_lines(failure.traceback)))


def _run_end(record: Record) -> Iterator[EventText]:
    end = RunEnd.of(record)
    parts = [f"{end.status}  step {or_dash(end.step)}"]
    if end.loss is not None:
        parts.append(f"loss {decimal(end.loss, 4)}")
    if end.seconds is not None:
        parts.append(duration(end.seconds))
    yield EventText("end", "", "  ".join(parts))


def _unknown(record: Record) -> Iterator[EventText]:
    """An event of a later version: its fields as they are."""
    fields = (f"{key} {value}" for key, value in record.items() if key not in ("event", "time", "step"))
    yield from _headed(text(record.get("event")), _at(record), "", "  ".join(fields))


def _headed(word: str, at: str, head: str, body: str) -> Iterator[EventText]:
    """Of a body of several lines the first one beside `head`."""
    first, *rest = body.strip().split("\n")
    yield EventText(word, at, "  ".join(filter(None, (head, first))), tuple(rest))


def _lines(body: str) -> tuple[str, ...]:
    return tuple(line.rstrip() for line in body.strip("\n").split("\n")) if body.strip("\n") else ()


def _at(record: Record) -> str:
    return f"step {or_dash(whole(record.get('step')))}"


_TELLERS: dict[str, Callable[[Record], Iterator[EventText]]] = {
    "run_start": _run_start,
    "setup_begin": _setup_begin,
    "setup": _setup,
    "data": _data,
    "horizon": _horizon,
    "setup_done": _setup_done,
    "estimate": _estimate,
    "device": _device,
    "eval": _eval,
    "generate": _generate,
    "checkpoint": _checkpoint,
    "model": _checkpoint,
    "signal": _signal,
    "stop": _stop,
    "control": _control,
    "paused": _paused,
    "requeue": _requeue,
    "nonfinite": _nonfinite,
    "resumed": _resumed,
    "rollback": _rollback,
    "restart": _restart,
    "skipped": _skipped,
    "phase": _phase,
    "health": _health,
    "stuck": _stuck,
    "tokenise": _tokenise,
    "warning": _warning,
    "profile": _profile,
    "memory_snapshot": _memory_snapshot,
    "alert": _alert,
    "notify": _notify,
    "failure": _failure,
    "run_end": _run_end,
}
