"""What an examination says: one line a finding, in words. Knows nothing of how anything is examined."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """A note explains or advises; a problem is something to repair."""

    severity: Severity
    topic: str
    text: str

    def __str__(self) -> str:
        mark = "PROBLEM" if self.severity == "problem" else self.severity
        return f"{mark:8}{self.topic:13}{self.text}"

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def ok(topic: str, text: str) -> Finding:
    """Something that is as it should be."""
    return Finding("ok", topic, text)


def note(topic: str, text: str) -> Finding:
    """Something that costs speed, or that one should know."""
    return Finding("note", topic, text)


def problem(topic: str, text: str) -> Finding:
    """Something to repair."""
    return Finding("problem", topic, text)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Whether anything needs repair."""
    return any(finding.severity == "problem" for finding in findings)
