"""The exception that this package raises for mistakes of the user."""


class DataError(ValueError):
    """An error in the user's data, path or option.

    The message is one readable line: the value found, what was expected, and the file, offset or flag.
    """
