"""Objects that belong to one process: using them after a fork, or pickling them, raises a clear error."""

from __future__ import annotations

import os
from typing import NoReturn

from edgekit.errors import RuntimeClosed, Unsupported


class OwnedByProcess:
    """Base of objects that hold an open model. Threads may share them, other processes may not."""

    def __init__(self) -> None:
        self._owner = os.getpid()

    @property
    def is_forked(self) -> bool:
        """True in a process that was forked after this object was made, where its threads do not exist."""
        return os.getpid() != self._owner

    def check_process(self) -> None:
        """Raise `RuntimeClosed` in a forked process, where a lock may be held by a thread that does not exist."""
        if self.is_forked:
            raise RuntimeClosed(
                f"this runtime belongs to process {self._owner}; open the artifact again in process {os.getpid()}"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise Unsupported(
            f"a {type(self).__name__} cannot be pickled or copied, since it holds an open model; "
            "give the artifact's path to the other process and open it there"
        )
