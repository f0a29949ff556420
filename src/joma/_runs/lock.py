"""The one lock between processes: ``flock`` on a file. The system releases it when its holder ends.

Run folders, entries of the cache and downloaded revisions are locked with it. (The library `filelock`
has no lock that several readers share, and does not notice that the former holder removed the file.)
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
    """Lock ``file``, and create it if it does not exist.

    Arguments:
        file: the lock file; its folder must exist.
        shared: allow other shared locks at the same time.
        wait: wait until the lock is free.
        unavailable: called with the reason if the system or the file system has no locks.
            If it returns, the file counts as locked.

    Returns:
        The file's descriptor; closing it releases the lock. None if another process holds the lock
        and ``wait`` is False.
    """
    while True:  # until the locked file is the one that now has this name
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            import fcntl

            operation = fcntl.LOCK_EX
            if shared:
                operation = fcntl.LOCK_SH
            if not wait:
                operation |= fcntl.LOCK_NB
            fcntl.flock(descriptor, operation)
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
        if _is_same_file(descriptor, file):
            return descriptor
        os.close(descriptor)


def is_free(file: Path) -> bool | None:
    """Return True if no process holds the lock on ``file``, which need not exist; None if unknown.

    This takes a shared lock for a moment. A writer that asks at the same moment has to ask a second time.
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


def _is_same_file(descriptor: int, file: Path) -> bool:
    """True unless the former holder removed or moved the file after it was opened here."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
