"""Equation 8: outcome scores corrected on held-out rounds.

The decoder's errors compound over the product of equation 6; six coefficients, an anchor
temperature and a threshold fitted to realised outcomes undo most of it. They change which outcomes
are pre-drafted, never the text. Knows nothing of how rounds are collected or stored.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from decoding.outcomes import (
    PROBABILITY_FLOOR,
    OutcomeTable,
    check_shapes,
    draft_log_probabilities,
    rank_outcomes,
    row_candidates,
)

NUM_FEATURES = 6
ANCHOR_CANDIDATES = 32
_POSITION_SCALE = 14.0
_RIDGE = 1e-3
_MAX_NEWTON_STEPS = 100
_NEWTON_TOLERANCE = 1e-10
_LOG_TEMPERATURE_BOUNDS = (math.log(0.05), math.log(20.0))
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0

Weights = tuple[float, float, float, float, float, float]


class InvalidCalibration(ValueError):
    """A stored calibration cannot be read."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Coefficients of φ, the anchor temperature β and the conformal threshold, a log score."""

    weights: Weights
    anchor_temperature: float
    threshold: float | None

    def __post_init__(self) -> None:
        if len(self.weights) != NUM_FEATURES or not all(math.isfinite(weight) for weight in self.weights):
            raise InvalidCalibration(f"weights must be {NUM_FEATURES} finite numbers")
        if not (math.isfinite(self.anchor_temperature) and self.anchor_temperature > 0.0):
            raise InvalidCalibration("anchor_temperature must be finite and positive")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise InvalidCalibration("threshold must be finite or null")

    @classmethod
    def uncalibrated(cls) -> "Calibration":
        """Takes the decoder at its word: p̃_i = p̂_i (within the floor) and β = 1."""
        return cls((0.0, 1.0, 0.0, 0.0, 0.0, 0.0), 1.0, None)

    def to_json(self) -> str:
        """What `from_json` reads."""
        fields = {
            "weights": list(self.weights),
            "anchor_temperature": self.anchor_temperature,
            "threshold": self.threshold,
        }
        return json.dumps(fields, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """Raises InvalidCalibration, naming the field."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidCalibration(f"not JSON: {error}") from error
        if not isinstance(fields, dict) or set(fields) != {"weights", "anchor_temperature", "threshold"}:
            raise InvalidCalibration("expected exactly the fields weights, anchor_temperature and threshold")
        if not isinstance(fields["weights"], list) or len(fields["weights"]) != NUM_FEATURES:
            raise InvalidCalibration(f"weights must be {NUM_FEATURES} finite numbers")
        a, b, c, d, e, f = (_number("weights", weight) for weight in fields["weights"])
        threshold = None if fields["threshold"] is None else _number("threshold", fields["threshold"])
        return cls((a, b, c, d, e, f), _number("anchor_temperature", fields["anchor_temperature"]), threshold)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What one held-out round teaches: its features, and where it ended."""

    features: tuple[Weights, ...]
    """φ_i of every draft, i = 1..γ."""
    num_accepted: int
    """k*, before any cut at the end of the text."""
    anchor_log_probabilities: tuple[float, ...]
    """Log-probabilities of the anchors the decoder proposed at k*, d_{k*+1} removed."""
    anchor_index: int | None
    """Which of them was realised; None when none was."""


def features(
    log_p: Float[Tensor, "slots candidates_vocab"],
    draft_columns: Sequence[int],
    draft_confidences: Float[Tensor, " drafts"],
) -> Float64[Tensor, "drafts 6"]:
    """φ_i of every draft token (appendix B.1).

    `draft_confidences` holds the draft model's top-1 probability of each slot in its last pass.
    The scaled position counts from 0, so that block 16 spans [0, 1].
    """
    check_shapes(log_p, draft_columns)
    if draft_confidences.shape[0] != len(draft_columns):
        raise ValueError(f"{len(draft_columns)} drafts need as many confidences, got {draft_confidences.shape[0]}")
    num_drafts = len(draft_columns)
    device = log_p.device
    log_draft = draft_log_probabilities(log_p, draft_columns)
    two_largest = _two_largest(log_p[:num_drafts])
    is_decoder_top = log_draft >= two_largest[:, 0]
    log_runner_up = torch.where(is_decoder_top, two_largest[:, 1], two_largest[:, 0])
    # expm1 keeps 1 - p̂ exact where p̂ is close to 1, the usual case.
    rest = (-torch.expm1(log_draft)).clamp(min=PROBABILITY_FLOOR)
    position = torch.arange(num_drafts, dtype=torch.float64, device=device) / _POSITION_SCALE
    columns = [
        _logit(draft_confidences.to(device=device, dtype=torch.float64)),
        _logit(log_draft.exp()),
        is_decoder_top.to(torch.float64),
        _logit(log_runner_up.exp() / rest),
        position,
        torch.ones_like(position),
    ]
    return torch.stack(columns, dim=1)


def calibrated_scores(
    log_p: Float[Tensor, "slots candidates_vocab"],
    draft_columns: Sequence[int],
    draft_confidences: Float[Tensor, " drafts"],
    calibration: Calibration,
    limit_per_row: int = ANCHOR_CANDIDATES,
) -> OutcomeTable:
    """log P̃(k)·P_β(a|k) of each row's likeliest anchors, best first (equation 8)."""
    log_length = _log_length(features(log_p, draft_columns, draft_confidences), calibration.weights)
    candidates = row_candidates(log_p, draft_columns, limit_per_row)
    log_anchor = _log_anchor(candidates.log_p, calibration.anchor_temperature)
    return rank_outcomes(log_length[:, None] + log_anchor, candidates.column)


def observe_round(
    log_p: Float[Tensor, "slots candidates_vocab"],
    draft_columns: Sequence[int],
    draft_confidences: Float[Tensor, " drafts"],
    num_accepted: int,
    anchor_column: int,
) -> RoundRecord:
    """The record of a round whose foresight gave `log_p` and which ended at (k*, anchor).

    `anchor_column` is -1 when the trimmed vocabulary lacks the realised anchor.
    """
    rows = features(log_p, draft_columns, draft_confidences).tolist()
    candidates = row_candidates(log_p, draft_columns, ANCHOR_CANDIDATES)
    log_anchors = candidates.log_p[num_accepted]
    possible = (log_anchors > -math.inf).nonzero().flatten()
    columns = candidates.column[num_accepted][possible].tolist()
    return RoundRecord(
        features=tuple((a, b, c, d, e, f) for a, b, c, d, e, f in rows),
        num_accepted=num_accepted,
        anchor_log_probabilities=tuple(log_anchors[possible].tolist()),
        anchor_index=columns.index(anchor_column) if anchor_column in columns else None,
    )


def fit(records: Sequence[RoundRecord], target_rate: float = 0.9) -> Calibration:
    """Weights by logistic regression, β by maximum likelihood, λ by split-conformal prediction.

    As in the paper all three come from the same rounds. Raises ValueError without a round that
    verified at least one draft.
    """
    weights = fit_weights(records)
    temperature = fit_anchor_temperature(records)
    scores = [realised_score(record, weights, temperature) for record in records]
    return Calibration(weights, temperature, conformal_threshold(scores, target_rate))


def fit_weights(records: Sequence[RoundRecord]) -> Weights:
    """Maximum likelihood of k*: each draft up to the first rejection is one Bernoulli trial."""
    rows: list[Weights] = []
    labels: list[float] = []
    for record in records:
        num_tested = min(record.num_accepted + 1, len(record.features))
        rows.extend(record.features[:num_tested])
        labels.extend(1.0 if index < record.num_accepted else 0.0 for index in range(num_tested))
    if not rows:
        raise ValueError("no round verified a draft: nothing to fit")
    inputs = torch.tensor(rows, dtype=torch.float64)
    targets = torch.tensor(labels, dtype=torch.float64)
    a, b, c, d, e, f = _logistic_regression(inputs, targets).tolist()
    return (a, b, c, d, e, f)


def fit_anchor_temperature(records: Sequence[RoundRecord]) -> float:
    """Maximum likelihood of the realised anchors; 1 when the decoder proposed none of them."""
    groups = [
        (torch.tensor(record.anchor_log_probabilities, dtype=torch.float64), record.anchor_index)
        for record in records
        if record.anchor_index is not None
    ]
    if not groups:
        return 1.0
    width = max(log_p.shape[0] for log_p, _ in groups)
    padded = torch.full((len(groups), width), -math.inf, dtype=torch.float64)
    for row, (log_p, _) in enumerate(groups):
        padded[row, : log_p.shape[0]] = log_p
    realised = torch.tensor([index for _, index in groups])[:, None]

    def loss(log_temperature: float) -> float:
        return -float(_log_anchor(padded, math.exp(log_temperature)).gather(1, realised).mean())

    # The loss is convex in 1/β, hence unimodal in log β.
    return math.exp(_golden_section(loss, *_LOG_TEMPERATURE_BOUNDS))


def realised_score(record: RoundRecord, weights: Weights, anchor_temperature: float) -> float:
    """The log score the calibrated rule gave to what happened; -inf when it was no candidate."""
    if record.anchor_index is None:
        return -math.inf
    inputs = torch.tensor(record.features, dtype=torch.float64).reshape(-1, NUM_FEATURES)
    log_length = _log_length(inputs, weights)[record.num_accepted]
    log_anchors = torch.tensor([record.anchor_log_probabilities], dtype=torch.float64)
    return float(log_length + _log_anchor(log_anchors, anchor_temperature)[0, record.anchor_index])


def conformal_threshold(scores: Sequence[float], target_rate: float) -> float | None:
    """The log score that a new round's outcome reaches with probability at least `target_rate`.

    None when the rounds are too few, or too badly predicted, to promise that.
    """
    if not 0.0 < target_rate < 1.0:
        raise ValueError(f"target_rate must be in (0, 1), got {target_rate}")
    rank = math.floor((len(scores) + 1) * (1.0 - target_rate) + 1e-9)
    if rank == 0:
        return None
    threshold = sorted(scores)[rank - 1]
    return threshold if math.isfinite(threshold) else None


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidCalibration(f"{field} must hold numbers, got {value!r}")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidCalibration(f"{field} must hold finite numbers") from error


def _logit(probability: Tensor) -> Tensor:
    return torch.logit(probability, eps=PROBABILITY_FLOOR)


def _two_largest(log_p: Tensor) -> Tensor:
    largest = torch.topk(log_p, min(2, log_p.shape[1]), dim=1).values.to(torch.float64)
    return torch.nn.functional.pad(largest, (0, 2 - largest.shape[1]), value=-math.inf)  # [drafts, 2]


def _log_length(inputs: Tensor, weights: Weights) -> Tensor:
    """log P̃(k) for k = 0..γ: G(k)(1 - p̃_{k+1}), and G(γ) at the end."""
    log_odds = inputs @ torch.tensor(weights, dtype=torch.float64, device=inputs.device)
    log_accepted = torch.nn.functional.logsigmoid(log_odds)
    log_rejected = torch.nn.functional.logsigmoid(-log_odds)
    log_reach = torch.nn.functional.pad(log_accepted.cumsum(0), (1, 0))
    return log_reach + torch.nn.functional.pad(log_rejected, (0, 1))  # [slots]


def _log_anchor(candidate_log_p: Tensor, anchor_temperature: float) -> Tensor:
    """log P_β(a|k) over each row's candidates; nan for a row without any."""
    return torch.log_softmax(candidate_log_p / anchor_temperature, dim=1)


def _logistic_regression(inputs: Tensor, targets: Tensor) -> Tensor:
    """Newton's method on the ridge-penalised likelihood, halving a step that overshoots."""
    ridge = _RIDGE * torch.eye(inputs.shape[1], dtype=torch.float64)

    def loss(candidate: Tensor) -> float:
        log_odds = inputs @ candidate
        misfit = torch.nn.functional.softplus(log_odds) - targets * log_odds
        return float(misfit.sum() + 0.5 * _RIDGE * candidate.square().sum())

    weights = torch.zeros(inputs.shape[1], dtype=torch.float64)
    current = loss(weights)
    for _ in range(_MAX_NEWTON_STEPS):
        predicted = torch.sigmoid(inputs @ weights)
        gradient = inputs.T @ (predicted - targets) + _RIDGE * weights
        curvature = inputs.T @ (inputs * (predicted * (1.0 - predicted))[:, None]) + ridge
        step = torch.linalg.solve(curvature, gradient)
        while loss(weights - step) > current and float(step.abs().max()) > _NEWTON_TOLERANCE:
            step = step / 2.0
        weights = weights - step
        current = loss(weights)
        if float(step.abs().max()) <= _NEWTON_TOLERANCE:
            break
    return weights


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimiser of a unimodal function on [low, high], to about 1e-6."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-6:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2.0
