"""What can stop a benchmark, by what its user can do about it."""


class WrongInput(ValueError):
    """A flag, a prompt file or a setting of a method cannot be used; the message names it."""


class ContestantFailed(RuntimeError):
    """A server or a peer cannot be measured any further; the others can."""
