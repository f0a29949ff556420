"""The one lock between processes: ``flock`` on a file. It goes with the process that holds it, however that ends.

Run folders, entries of the cache and downloaded revisions are locked with it. (The library `filelock` has no lock that
several readers share, and does not notice that the former holder removed the file.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def take(
    file: Path,
    *,
    shared: bool = False,
    wait: bool = False,
    unavailable: Callable[[ImportError | OSError], object] = lambda error: None,
) -> int | None:
    """Lock ``file``, which is made if need be.

    Arguments:
        file: stands for what is locked; its folder must exist.
        shared: with others that say so too; else alone.
        wait: until it is free.
        unavailable: called with the reason where the system or the file system has no locks.
            If it returns, the file counts as locked.

    Returns:
        The file's descriptor: closing it releases the lock. None if others have it and ``wait`` is False.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            import fcntl

            fcntl.flock(
                descriptor,
                (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB),
            )
        except BlockingIOError:
            os.close(descriptor)
            return None
        except (ImportError, OSError) as error:
            try:
                unavailable(error)
            except BaseException:
                os.close(descriptor)
                raise
        except BaseException:  # Ctrl-C while waiting
            os.close(descriptor)
            raise
        if _is(descriptor, file):
            return descriptor
        os.close(descriptor)


def is_free(file: Path) -> bool | None:
    """True if nobody holds the lock on ``file``, which need not exist; None if this cannot be found out.

    The lock is taken, shared, for a moment. A writer that asks for it in this very moment has to ask again.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return None
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    finally:
        os.close(descriptor)
    return True


def _is(descriptor: int, file: Path) -> bool:
    """Whether the file is still there: its former holder may have removed or moved it since we opened it."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
