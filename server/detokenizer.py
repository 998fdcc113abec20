"""Text out of a stream of tokens: whole characters only, and an end at the first stop string.

Both classes take what one committed token brings and say what may be shown. Their results do not depend on how the
tokens were grouped into blocks. Nothing here knows where tokens come from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
MAX_PARTIAL_REPLACEMENTS = 3
"""A UTF-8 character has at most four bytes, so at most three replacement characters can still become one."""
MAX_WINDOW_TOKENS = 48
KEPT_WINDOW_TOKENS = 8

DecodeFunction = Callable[[Sequence[int]], str]


def num_partial(text: str) -> int:
    """Replacement characters at the end of a text that further tokens may still turn into a character."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_PARTIAL_REPLACEMENTS)


class IncrementalDecoder:
    """Decodes token by token; text that may still change, a character whose bytes are not all there, is held back.

    Only a short window of tokens is decoded each time. It starts one step before the new tokens, because decoders treat
    the first token of a text in their own way (a leading space is dropped, for one). `context` is what stands before
    the text, shown already but for a character that is not complete.
    """

    def __init__(self, decode: DecodeFunction, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = list(context)
        self._num_settled = 0  # tokens of the window whose text is complete
        self._num_shown = 0  # characters of the window's text already given out
        if context:
            text = decode(self._window)
            num_held = num_partial(text)
            self._num_shown = len(text) - num_held
            self._num_settled = 0 if num_held else len(self._window)

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; may be empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = num_partial(text)
        shown = self._show(text, len(text) - num_held)
        if shown and num_held == 0:
            # A token without text of its own (a special one) is no context for the next: the window keeps growing.
            self._settle()
        elif len(self._window) > MAX_WINDOW_TOKENS:
            self._shorten(text)
        return shown

    def flush(self) -> str:
        """What was held back; the text ends here."""
        text = self._decode(self._window) if self._window else ""
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        shown = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return shown

    def _settle(self) -> None:
        """Everything is given out: the newest tokens become the context of the next ones."""
        del self._window[: self._num_settled]
        self._num_settled = len(self._window)
        self._num_shown = len(self._decode(self._window))

    def _shorten(self, text: str) -> None:
        """Never a whole character for a long time (binary output): restart the window where that changes nothing."""
        rest = self._window[-KEPT_WINDOW_TOKENS:]
        rest_text = self._decode(rest)
        num_held = len(text) - self._num_shown
        if text.endswith(rest_text) and len(rest_text) >= num_held:
            self._window = rest
            self._num_settled = 0
            self._num_shown = len(rest_text) - num_held


@dataclass(frozen=True)
class Scanned:
    """What a piece of text brought: the part that may be shown, and the stop string it completed, if any."""

    text: str
    stop: str | None = None


class StopScanner:
    """Cuts a text at the first stop string to become complete; of several at one place, the longest.

    The end of the text that may still turn into a stop string is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> Scanned:
        """Scan a further piece of text. After a stop nothing more may be pushed."""
        if not self._stops:
            return Scanned(text)
        pending = self._held + text
        match = self._first_match(pending)
        if match is not None:
            end, stop = match
            self._held = ""
            return Scanned(pending[: end if self._include_stop else end - len(stop)], stop)
        num_held = self._num_partial(pending)
        self._held = pending[len(pending) - num_held :]
        return Scanned(pending[: len(pending) - num_held])

    def skip(self, text: str) -> Scanned:
        """Text in which no stop string counts (before `min_tokens`)."""
        return Scanned(self.flush() + text)

    def flush(self) -> str:
        """What was held back; the text ends here."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, pending: str) -> tuple[int, str] | None:
        matches = [(start + len(stop), -len(stop), stop) for stop in self._stops if (start := pending.find(stop)) >= 0]
        if not matches:
            return None
        end, _, stop = min(matches)
        return end, stop

    def _num_partial(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop string."""
        longest = min(len(pending), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self._stops):
                return length
        return 0
