"""What a training command answers with one line instead of a traceback."""


class InputError(ValueError):
    """Something the user gave cannot be used; the message names it and what differs."""
