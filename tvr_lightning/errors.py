"""The mark of errors that a user can mend: the command line prints their sentence instead of a traceback."""


class UserError(Exception):
    """Something outside the program is wrong: a file, an option, missing weights.

    Errors that say so inherit from it beside a built-in exception, e.g. `class VideoError(UserError, ValueError)`.

    Attributes:
        exit_status: what the command line ends with.
    """

    exit_status = 1


class MissingAssetError(UserError, FileNotFoundError):
    """Data or weights are not there; the message says what, where it was looked for, and what is expected."""
