"""Every error of the runtime, named for what the caller does next. Imports nothing.

SkerryError
  Retryable      the store is busy, unreachable or gave no clear answer: try again later
    Ambiguous    a write may have happened: read the key back first
  Conflict       another writer was first: read its object and continue from there
  Invalid        the input is wrong: correct it, a retry cannot help
  Unauthorized   the store refuses these credentials: correct the rights, a retry cannot help
  Corrupt        bytes do not match their digest or format: use another copy
  Diverged       the log and this replica differ: stop contributing, heal from the log
  Fenced         a newer incarnation owns this slot: exit
  Moved          the run goes on at another URI: exit
  RunFinished    the run has ended: stop training; this is not a failure
"""


class SkerryError(Exception):
    """Base of all errors that skerry raises."""


class Retryable(SkerryError):  # noqa: N818  errors are named for the next step, not with a suffix
    """The same call may succeed later, and is not known to have had an effect."""


class Ambiguous(Retryable):
    """A write without a clear answer: it may have happened."""


class Conflict(SkerryError):  # noqa: N818
    """Another writer was first."""


class Invalid(SkerryError, ValueError):  # noqa: N818
    """The input cannot be used; the message names the place and a valid form."""


class NotFinite(Invalid):
    """A value is NaN or infinite as transmitted. tensor: its position in the exchange; element: in the flat tensor."""

    def __init__(self, message: str, *, tensor: int, element: int) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.element = element


class Unauthorized(SkerryError):  # noqa: N818
    """The store refuses or does not know these credentials."""


class Corrupt(SkerryError):  # noqa: N818
    """Stored bytes are damaged; the message names the key and the field."""


class Diverged(SkerryError):  # noqa: N818
    """This replica's state differs from the log; contributing would spread the difference."""


class Fenced(SkerryError):  # noqa: N818
    """A newer incarnation of this slot exists; this one must stop."""


class Moved(SkerryError):  # noqa: N818
    """The run goes on at another URI, which the message names; nothing may be added to it here."""


class RunFinished(SkerryError):  # noqa: N818
    """The run has all its rounds, or cannot get more."""
