"""Reading of files that others have written: regular files alone, up to a size.

A read of a pipe or device may never end, and a file without a bound may take all memory. Every room may import this.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

# Bytes of a file of JSON that is read whole: the largest plans and states of checkpoints are far below.
MOST_JSON: Final = 2**28


def reason_of(error: OSError) -> str:
    """Return why the file system refused something; for a name that a symbolic link without a target has, where the
    link leads."""
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if isinstance(error, FileExistsError) and path is not None and path.is_symlink() and not path.exists():
        return f"{path} is a symbolic link to {path.readlink()}, which does not exist"
    return error.strerror or str(error)


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for what is not a regular file."""
    # A pipe without a writer would be waited for.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_regular(path: Path | str, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises OSError, also for what is not a regular file and
    for a larger one."""
    with open_regular(path) as file:
        large = os.fstat(file.fileno()).st_size > most
        content = b"" if large else file.read()
        if large or len(content) > most:
            raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content


def read_json(path: Path | str, most: int = MOST_JSON) -> Any:
    """Return the value that a file of JSON holds. Raises OSError as `read_regular`, and ValueError for what is not JSON
    or nested too deeply."""
    content = read_regular(path, most)
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
