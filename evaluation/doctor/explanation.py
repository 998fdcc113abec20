"""Why the speed-up is what it is, in words: from the figures of a trial to findings. Pure; measures nothing.

A drafted round brings τ tokens and takes a verification of γ + 1 rows and what is exposed before it; a plain step
brings one token. What makes a round longer, or τ smaller, is named with its size.
"""

from collections.abc import Iterator

from evaluation.doctor.figures import Figures
from evaluation.doctor.findings import Finding, note, ok, problem

SHORT_DRAFTS = 0.4
"""Share of the drafts accepted, below which drafts are called short."""
MATTERS = 0.05
"""Share of a round, above which a cost is named."""
ROWS_COST = 1.15
LATE_SHARE = 0.1
KIND_LOSS = 0.8
"""τ of another kind of prompt, as a share of the usual one, below which the kind is named."""


def explain(figures: Figures, num_drafts: int, temperature: float) -> Iterator[Finding]:
    """The verdict, its arithmetic, then the reasons, in the order of a round. `num_drafts` is γ."""
    yield from _exactness(figures)
    if figures.alone:
        reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in figures.alone.items())
        yield problem("drafter", f"rounds without drafts that should have had some: {reasons}")
    tau, round_ms, step_ms = figures.drafted.tau, figures.round_ms, figures.plain_step_ms
    if tau is None or round_ms is None or step_ms is None or figures.speedup is None:
        yield problem("speed-up", "the answers were too short to measure; raise --max-tokens")
        return
    yield _verdict(figures.speedup)
    yield _arithmetic(figures, tau, round_ms, step_ms)
    yield from _drafts(figures, tau, num_drafts)
    yield from _verification(figures)
    yield from _exposed(figures, round_ms)
    yield from _kinds(figures)
    if temperature > 0:
        text = f"at {temperature:g} the target often draws a token that is not its likeliest: τ is lower than at 0"
        yield note("temperature", text)


def _exactness(figures: Figures) -> Iterator[Finding]:
    different, compared = figures.num_different_texts, figures.num_comparisons
    if different:
        text = (
            f"{different} of {compared} texts differ with speculation: that must never happen; see jetspecpp exactness"
        )
        yield problem("exactness", text)
    else:
        yield ok("exactness", f"all {compared} texts are the same with and without drafts")


def _verdict(speedup: float) -> Finding:
    if speedup < 1.0:
        return problem("speed-up", f"{speedup:.2f}: slower than plain decoding, for the reasons below")
    return ok("speed-up", f"{speedup:.2f} over plain decoding")


def _arithmetic(figures: Figures, tau: float, round_ms: float, step_ms: float) -> Finding:
    verify_ms, exposed_ms = figures.drafted.verify_ms or 0.0, figures.drafted.exposed_ms or 0.0
    hit_rate = "" if figures.drafted.hit_rate is None else f", hit rate {figures.drafted.hit_rate:.0%}"
    return ok(
        "arithmetic",
        f"τ {tau:.2f} tokens in a round of {round_ms:.1f} ms (verification {verify_ms:.1f}, exposed {exposed_ms:.1f}"
        f"{hit_rate}), one in a plain step of {step_ms:.1f} ms: {tau * step_ms / round_ms:.2f} times as fast",
    )


def _drafts(figures: Figures, tau: float, num_drafts: int) -> Iterator[Finding]:
    accepted = (tau - 1) / num_drafts
    if accepted >= SHORT_DRAFTS:
        return
    text = f"drafts are short: τ {tau:.1f} of at most {num_drafts + 1}"
    if figures.drafted.acceptance:
        text += f"; the first draft is right in {figures.drafted.acceptance[0]:.0%} of the blocks"
    if num_drafts > 3:
        text += "; fewer --num-speculative-tokens would cost less"
    yield note("drafts", text)


def _verification(figures: Figures) -> Iterator[Finding]:
    plain_ms, drafted_ms = figures.plain.verify_ms, figures.drafted.verify_ms
    if plain_ms and drafted_ms and drafted_ms > ROWS_COST * plain_ms:
        ratio = drafted_ms / plain_ms
        text = f"checking a block takes {drafted_ms:.1f} ms, a plain step {plain_ms:.1f}: {ratio:.2f} times"
        yield note("verification", text)


def _exposed(figures: Figures, round_ms: float) -> Iterator[Finding]:
    hit_ms, miss_ms = figures.hit_exposed_ms or 0.0, figures.miss_exposed_ms
    verify_ms, draft_ms = figures.drafted.verify_ms or 0.0, figures.draft_ms
    if draft_ms is not None and draft_ms > verify_ms:
        text = f"the drafter's plan does not fit: it takes {draft_ms:.1f} ms, a verification {verify_ms:.1f} ms"
        yield note("plan", f"{text}; lower --cache-size, --passes or --refreshes, or leave them on auto")
    elif figures.share("late_hit") > LATE_SHARE:
        yield note("plan", f"{figures.share('late_hit'):.0%} of the blocks were on their way, but late")
    if miss_ms is not None:
        cost_ms = figures.share("miss") * max(0.0, miss_ms - hit_ms)
        if cost_ms > MATTERS * round_ms:
            drafting = "" if figures.fallback_ms is None else f", of which drafting {figures.fallback_ms:.1f} ms"
            share = figures.share("miss")
            text = f"misses cost {cost_ms:.1f} ms a round: {share:.0%} of the blocks, {miss_ms:.1f} ms each"
            yield note("misses", f"{text}{drafting}; a larger --cache-size, or a better adapter, misses less")
    if hit_ms > MATTERS * round_ms:
        yield note("hits", f"even hits wait {hit_ms:.1f} ms: the verifier's own work between rounds, or a busy core")


def _kinds(figures: Figures) -> Iterator[Finding]:
    usual = figures.tau_by_kind.get("short")
    if usual is None:
        return
    long, quiet = figures.tau_by_kind.get("long"), figures.tau_by_kind.get("no thinking")
    if long is not None and long < KIND_LOSS * usual:
        text = (
            f"behind a long text τ falls from {usual:.2f} to {long:.2f}: prompts longer than the drafter was trained on"
        )
        yield note("long prompts", text)
    if quiet is not None and quiet < KIND_LOSS * usual:
        text = f"τ is {quiet:.2f} without thinking and {usual:.2f} with it: the drafter was trained on thinking"
        yield note("thinking", text)
    elif quiet is not None and usual < KIND_LOSS * quiet:
        text = f"τ is {usual:.2f} with thinking and {quiet:.2f} without it: the drafter was trained without thinking"
        yield note("thinking", text)
