"""Text on the screen that is drawn anew only when it has become another."""

from textual.content import Content
from textual.widget import Widget


class TextBlock(Widget):
    """Lines of text, cut at the edge and never wrapped: the caller makes them for the width."""

    DEFAULT_CSS = """
    TextBlock { height: 1; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._content = Content()
        self._rows: int | None = None

    @property
    def text(self) -> str:
        """The text shown."""
        return self._content.plain

    def show(self, content: Content, *, rows: int | None = None) -> None:
        """Show `content` from now on, in `rows` rows of the screen (None: as many as it has now)."""
        if rows is not None and rows != self._rows:
            self._rows = rows
            self.display = rows > 0
            self.styles.height = rows
        if not self._content.is_same(content):
            self._content = content
            self.refresh()

    def render(self) -> Content:
        return self._content
