"""One spelling for one path, so that a plan does not depend on how it was written."""

import os


def portable(path: str) -> str:
    """`./data//x` is `data/x`."""
    return os.path.normpath(path).replace(os.sep, "/")
