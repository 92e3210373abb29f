"""`DataError`: data, a tokenizer or a data setting that cannot be used as given."""

from os import PathLike


class DataError(Exception):
    """Data, a tokenizer or a data setting that cannot be used as given; diagnostic code X507.

    The text reads `file:line: what is wrong`, then the remedy on a line of its own.
    """

    code = "X507"

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        line: int | None = None,
        remedy: str | None = None,
    ) -> None:
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(f"{where}{message}" if remedy is None else f"{where}{message}\n  {remedy}")
        self.message = message
        self.path = path
        self.line = line
        self.remedy = remedy
