"""The words of `jetspecpp doctor` for given figures: each reason where it applies, and only there."""

from dataclasses import replace

import pytest

from evaluation.bench.counters import RoundStatistics
from evaluation.doctor.explanation import explain
from evaluation.doctor.figures import Figures
from evaluation.doctor.findings import has_problem

PLAIN = RoundStatistics(100, 1.0, None, 30.0, 0.0, (), {"autoregressive": 100})
DRAFTED = RoundStatistics(100, 3.5, 0.9, 33.0, 1.0, (0.9, 0.7), {"hit": 90, "miss": 10, "first": 4})
HEALTHY = Figures(
    speedup=3.0,
    plain=PLAIN,
    drafted=DRAFTED,
    hit_exposed_ms=0.8,
    miss_exposed_ms=3.0,
    draft_ms=25.0,
    fallback_ms=2.0,
    tau_by_kind={"short": 3.5, "long": 3.3},
    num_comparisons=4,
)


def drafted(**changes: object) -> Figures:
    """Healthy figures, but for some of the drafted rounds'."""
    return replace(HEALTHY, drafted=replace(DRAFTED, **changes))  # type: ignore[arg-type]


def by_topic(figures: Figures, temperature: float = 0.0) -> dict[str, str]:
    return {finding.topic: finding.text for finding in explain(figures, 4, temperature)}


def test_a_healthy_server_gets_the_verdict_and_the_arithmetic() -> None:
    findings = list(explain(HEALTHY, 4, 0.0))
    assert not has_problem(findings)
    assert [finding.topic for finding in findings] == ["exactness", "speed-up", "arithmetic"]
    assert findings[2].text == (
        "τ 3.50 tokens in a round of 34.0 ms (verification 33.0, exposed 1.0, hit rate 90%), "
        "one in a plain step of 30.0 ms: 3.09 times as fast"
    )


@pytest.mark.parametrize(
    ("figures", "topic", "words"),
    [
        (drafted(tau=2.1), "drafts", "drafts are short: τ 2.1 of at most 5; the first draft is right in 90%"),
        (drafted(verify_ms=48.0), "verification", "checking a block takes 48.0 ms, a plain step 30.0: 1.60 times"),
        (replace(HEALTHY, draft_ms=40.0), "plan", "plan does not fit: it takes 40.0 ms, a verification 33.0 ms"),
        (drafted(outcomes={"hit": 8, "late_hit": 2}), "plan", "20% of the blocks were on their way, but late"),
        (
            replace(HEALTHY, miss_exposed_ms=30.8),
            "misses",
            "misses cost 3.0 ms a round: 10% of the blocks, 30.8 ms each",
        ),
        (replace(HEALTHY, hit_exposed_ms=2.5), "hits", "even hits wait 2.5 ms"),
        (replace(HEALTHY, tau_by_kind={"short": 3.5, "long": 2.0}), "long prompts", "τ falls from 3.50 to 2.00"),
        (
            replace(HEALTHY, tau_by_kind={"short": 2.0, "no thinking": 3.5}),
            "thinking",
            "τ is 2.00 with thinking and 3.50 without it: the drafter was trained without thinking",
        ),
        (
            replace(HEALTHY, tau_by_kind={"short": 3.5, "no thinking": 2.0}),
            "thinking",
            "τ is 2.00 without thinking and 3.50 with it: the drafter was trained on thinking",
        ),
    ],
)
def test_reasons(figures: Figures, topic: str, words: str) -> None:
    assert words in by_topic(figures)[topic]
    assert set(by_topic(figures)) == {"exactness", "speed-up", "arithmetic", topic}


def test_temperature() -> None:
    assert "at 0.8 the target often draws" in by_topic(HEALTHY, 0.8)["temperature"]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (replace(HEALTHY, speedup=0.8), "0.80: slower than plain decoding"),
        (replace(HEALTHY, num_different_texts=1), "1 of 4 texts differ"),
        (replace(HEALTHY, alone={"timeout": 3, "drafter_lost": 1}), "3 timeout, 1 drafter lost"),
        (replace(HEALTHY, speedup=None), "too short to measure"),
        (drafted(tau=None, verify_ms=None), "too short to measure"),
    ],
)
def test_problems(figures: Figures, words: str) -> None:
    (found,) = [finding for finding in explain(figures, 4, 0.0) if finding.severity == "problem"]
    assert words in found.text
