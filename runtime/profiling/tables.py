"""Tables in Markdown that can be read as they are."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int) -> list[str]:
    """Its lines. texts: columns with words in them, at the left; numbers stand at the right of theirs."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if at < texts else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    rule = ["-" * width if at < texts else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    return [line(head), f"| {' | '.join(rule)} |", *map(line, rows)]
