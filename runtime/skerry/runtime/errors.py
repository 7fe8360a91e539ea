"""Every error of the runtime, named for what the caller does next. Raises nothing, imports nothing.

SkerryError
  Retryable      try again later: the store is busy, unreachable or gave no clear answer
    Ambiguous    a write may or may not have happened: read the key back before anything else
  Conflict       somebody else was first: read what they wrote and go on from there
  Invalid        the input is wrong: fix it, a repeat cannot help
  Unauthorized   the store refuses these credentials: fix the rights, a repeat cannot help
  Corrupt        bytes are not what their digest or their format says: use another copy
  Diverged       the log and this replica disagree: stop contributing, heal from the log
  Fenced         a newer incarnation owns this slot: exit
  RunFinished    the run is over: stop training, this is not a failure
"""


class SkerryError(Exception):
    """Root of everything that skerry raises on purpose."""


class Retryable(SkerryError):  # noqa: N818  errors are named for the next step, not with a suffix
    """The same call may succeed later; nothing is known to have happened."""


class Ambiguous(Retryable):
    """A write got no clear answer: it may have happened."""


class Conflict(SkerryError):  # noqa: N818
    """Another writer was first."""


class Invalid(SkerryError, ValueError):  # noqa: N818
    """What was given cannot be used; the message names the place and what to write instead."""


class Unauthorized(SkerryError):  # noqa: N818
    """The store knows us and says no, or does not know us."""


class Corrupt(SkerryError):  # noqa: N818
    """Stored bytes are damaged; the message names the key and the field."""


class Diverged(SkerryError):  # noqa: N818
    """This replica holds something else than the log says; going on would spread it."""


class Fenced(SkerryError):  # noqa: N818
    """A newer incarnation of this slot exists; this one must stop."""


class RunFinished(SkerryError):  # noqa: N818
    """The run has all its rounds, or can never have more."""
