"""The Server screen as rows of text: how busy a training server is, its models, and who waits for what."""

from xtrain.records.status import ServedModel, ServerStatus
from xtrain.text.units import brief, count, decimal, duration, plural
from xtrain.tui.pages.sheet import (
    ListPage,
    ListView,
    PageColumn,
    Row,
    bar,
    block,
    fit,
    fitting,
    joined,
    left,
    right,
    row,
    rows_of,
    rule,
    wrapped,
)

# A status that is older than this is not renewed any more.
OLD_SECONDS = 10.0
# Seconds of waiting that are reported.
_LONG_WAIT = 5.0


def page(status: ServerStatus, view: ListView, width: int, height: int, now: float) -> ListPage:
    """Return the page in `height` rows of `width` cells."""
    rows = [*_glance(status, width, now), rule("Models", width, plural(len(status.models), "model"))]
    words = [row((line, style)) for text, style in in_words(status, now) for line in wrapped(text, width, "  ")]
    words = words[: max(1, height // 4)]
    room = max(1, height - len(rows) - 1 - len(words))
    view = view.within(len(status.models), room)
    names = min(max([8, *(len(short(one.id)) for one in status.models)]), max(12, width // 3))
    columns, used = fitting(_columns(now), names, width)
    clients = width - used >= 12 and any(one.client for one in status.models)
    head = [left("model", names), *(right(column.title, column.width) for column in columns)]
    rows.append(fit(row((" ".join(head), "dim"), (f"  {'client' if clients else ''}", "dim")), width))

    def model_row(one: ServedModel) -> Row:
        line = [left(short(one.id), names), *(right(column.value(one), column.width) for column in columns)]
        client = (f"  {one.client}" if clients else "", "dim")
        return fit(row((" ".join(line), "bad" if one.damaged else "" if one.connected else "dim"), client), width)

    rows += [*rows_of(status.models, view, room, model_row), *words]
    return ListPage(rows=tuple(block(rows, width, height)), view=view, count=len(status.models), height=room)


def _columns(now: float) -> tuple[PageColumn[ServedModel], ...]:
    def ago(one: ServedModel) -> str:
        if one.last_time is None:
            return "–"
        return "now" if now - one.last_time < 1.5 else duration(now - one.last_time)

    return (
        PageColumn("is", 9, _is),
        PageColumn("steps", 6, lambda one: f"{one.steps:,}"),
        PageColumn("loss", 8, lambda one: decimal(one.loss, 4)),
        PageColumn("tokens", 7, lambda one: count(one.tokens)),
        PageColumn("waiting", 7, lambda one: str(one.waiting) if one.waiting else "–"),
        PageColumn("rank", 4, lambda one: "full" if one.rank is None else str(one.rank)),
        PageColumn("last", 8, ago),
    )


def short(id: str) -> str:
    """Return the id of a model with the beginning of its session, which distinguishes it from others."""
    session, _, rest = id.partition(":")
    return f"{session[:8]}:{rest}" if rest else session


def is_old(status: ServerStatus, now: float) -> bool:
    """Return True if the status of a server is not updated, although the server has not reported its end."""
    return status.state not in ("stopped", "failed") and now - status.time > OLD_SECONDS


def _glance(status: ServerStatus, width: int, now: float) -> list[Row]:
    facts = joined([status.url, f"{duration(max(0.0, status.time - status.began))} up"])
    in_memory = sum(one.in_memory for one in status.models)
    slots = f"{in_memory} of {plural(status.slots, 'slot')} in use"
    served = [
        f"{plural(status.requests, 'request')} done",
        f"{status.requests_per_second:.1f}/s",
        f"{plural(status.errors, 'error')}" if status.errors else "no errors",
    ]
    speed = [
        f"trained {count(status.trained_per_second)} tok/s",
        f"sampled {count(status.sampled_per_second)} tok/s",
        *(f"{name} {brief(seconds)}" for name, seconds in status.latency.items()),
    ]
    queue = f"  queue     {bar(status.waiting / status.queue if status.queue else 0, 12)} {status.waiting:,}"
    return [
        rule("Server", width, facts),
        fit(row(f"  clients   {joined([f'{status.clients} connected', slots])}"), width),
        fit(row(f"  requests  {joined(served)}"), width),
        fit(row(f"  speed     {joined(speed)}"), width),
        fit(row((queue, ""), (f" of {status.queue:,}", "dim")), width),
    ]


def in_words(status: ServerStatus, now: float) -> list[tuple[str, str]]:
    """Return sentences, each with the name of a style: faults, and who has long waited for what."""
    found: list[tuple[str, str]] = []
    if is_old(status, now):
        found.append((f"The server has written nothing for {duration(now - status.time)}.", "bad"))
    if status.state == "failed":
        found.append((f"The server has failed: {status.reason}", "bad"))
    if status.state == "restoring":
        found.append(("A rank was lost; all are started again, and models are restored as they are needed.", "warn"))
    if status.state == "draining":
        found.append(("The server is shutting down: new requests are refused, results can be fetched.", "warn"))
    found += [(f"{short(one.id)}: {one.damaged}", "bad") for one in status.models if one.damaged]
    late = sorted((one for one in status.models if one.waits_for), key=lambda one: -one.waited_seconds)
    found += [
        (f"{short(one.id)} has waited {duration(one.waited_seconds)} for {one.waits_for}", "warn")
        for one in late
        if one.waited_seconds >= _LONG_WAIT
    ]
    if not status.models:
        found.append(("No client has made a model yet.", "dim"))
    return found


def _is(one: ServedModel) -> str:
    if one.damaged:
        return "damaged"
    if not one.connected:
        return "left"
    return "in memory" if one.in_memory else "on disk"
