"""What screens have in common that are a list of things, one of them under a cursor, and words around it."""

from attrs import frozen

from xtrain.tui.pages.sheet import Row, window


@frozen(kw_only=True)
class ListView:
    """The reader's choices. place: index of the row under the cursor; top: the first visible row."""

    place: int = 0
    top: int = 0

    def within(self, count: int, height: int) -> "ListView":
        """Return the view limited to `count` items and `height` rows."""
        place = max(0, min(count - 1, self.place))
        return ListView(place=place, top=window(count, height, self.top, place))


@frozen(kw_only=True)
class ListPage:
    """Drawn rows. rows: at most as many as requested; count: number of items; height: visible rows of items."""

    rows: tuple[Row, ...]
    view: ListView
    count: int
    height: int


def moved(page: ListPage, by: int) -> ListView:
    """Move the cursor by some rows."""
    return ListView(place=max(0, min(page.count - 1, page.view.place + by)), top=page.view.top)
