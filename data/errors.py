"""The one exception of this package that users are meant to see."""


class DataError(ValueError):
    """A fault in a user's data, path or option.

    The message is one readable line: the value found, what was expected, and the file, offset or flag.
    """
