"""What the keys of the Events screen do to its view."""

from attrs import evolve

from xtrain.tui.pages.event_detail import PROBLEMS
from xtrain.tui.pages.event_pages import EventsPage, EventsView


def moved(page: EventsPage, by: int) -> EventsView:
    """Move the cursor by some events; in a text longer than the screen, scroll by lines."""
    view = page.view
    if view.log or view.shows == "detail":
        last = max(0, page.lines - page.height)
        begin = (last if view.log else 0) if view.scroll is None else view.scroll
        scroll = max(0, min(last, begin + by))
        return evolve(view, scroll=None if view.log and scroll == last else scroll)
    if not page.entries:
        return view
    place = max(0, min(len(page.entries) - 1, page.place + by))
    newest = place == len(page.entries) - 1 and by > 0
    return evolve(view, chosen=None if newest else page.entries[place].number)


def entered(page: EventsPage) -> EventsView:
    """Show the chosen event in full, and keep it chosen; or return to the list."""
    view = page.view
    if view.log or not page.entries:
        return view
    if view.shows == "detail":
        return evolve(view, shows="list", scroll=None)
    return evolve(view, shows="detail", scroll=None, chosen=page.entries[page.place].number)


def back(page: EventsPage) -> EventsView:
    """Leave a log, else an event in full, else a filter."""
    view = page.view
    if view.log:
        return evolve(view, log="", scroll=None)
    if view.shows == "detail":
        return evolve(view, shows="list", scroll=None)
    return evolve(view, kinds="all", query="")


def other_kinds(page: EventsPage, by: int) -> EventsView:
    """Switch to the next filter: all events, problems, or one of the existing kinds."""
    there = page.log.kinds
    choices = ["all", *(["problems"] if any(kind in there for kind in PROBLEMS) else []), *there]
    at = choices.index(page.view.kinds) if page.view.kinds in choices else 0
    chosen = choices[(at + by) % len(choices)]
    return evolve(page.view, kinds=chosen, log="", shows="list", scroll=None, chosen=None)


def other_log(page: EventsPage) -> EventsView:
    """Switch to the next of: the events, and each of the logs."""
    choices = ["", *(tail.name for tail in page.log.logs)]
    at = choices.index(page.view.log) if page.view.log in choices else 0
    return evolve(page.view, log=choices[(at + 1) % len(choices)], scroll=None)


def searched(page: EventsPage, query: str) -> EventsView:
    """Show only events that contain this text."""
    return evolve(page.view, query=query, shows="list", scroll=None, chosen=None)


def newest(page: EventsPage) -> EventsView:
    """Move to the newest event, and follow new ones."""
    return evolve(page.view, shows="list", chosen=None, scroll=None)
