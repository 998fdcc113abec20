"""Replayed rounds are what a server would see, and what is shared between variants changes none of them."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from decoding.calibration import Calibration
from decoding.plan import PassPlan
from decoding.rules import outcome_rank
from decoding.uniforms import noise_generator
from draft_worker.networks import DraftNetworks
from draft_worker.round import DraftRound, SelectionRule, fallback_block
from draft_worker.sequence import DraftSequence, new_memory
from draft_worker.synchronous import SynchronousMethod
from evaluation.baselines import replay_fallbacks
from evaluation.contestants import ALL_VARIANTS
from evaluation.replay import PlayedText, Player, Replay, ReplaySettings, Variant
from evaluation.rounds import Ending, Tally, sizes_that_hold, verify
from evaluation.texts import TargetText
from tests.evaluation.recorded import recorded
from tests.tiny.models import TinyModels

GAMMA = 4
NOISE_ID = 5
SOME_VARIANTS = (
    Variant("served", 0),
    Variant("served", 2),
    Variant("served", 2, "replace"),
    Variant("served", 1, "alone"),
    Variant("true", 1),
    Variant("true", 2, "replace"),
    Variant("predicted", 1),
    Variant("copied", 0),
)
NO_STOPS: frozenset[int] = frozenset()
CALIBRATION = Calibration((0.3, 0.8, 0.1, -0.2, 0.4, 0.1), 1.3, None)


def play(
    networks: DraftNetworks, text: TargetText, players: Sequence[Player], stops: frozenset[int] = NO_STOPS
) -> list[PlayedText]:
    settings = ReplaySettings(tuple(players), stops, {GAMMA: CALIBRATION})
    return Replay(networks, text, settings, NOISE_ID).run()


@pytest.fixture(scope="module")
def networks(models: TinyModels) -> DraftNetworks:
    return models.networks("trained")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_follow_each_other_through_the_text(
    models: TinyModels, networks: DraftNetworks, temperature: float
) -> None:
    players = [Player(variant, GAMMA) for variant in ALL_VARIANTS]
    for text in recorded(models, temperature):
        for played in play(networks, text, players):
            rounds, is_served = played.rounds, played.player.variant.states == "served"
            # The prefill's token comes first; a last block whose end is not recorded is left out.
            left = len(text.response_token_ids) - 1 - sum(r.ending.num_committed for r in rounds)
            assert 0 <= left <= GAMMA
            assert not rounds or not rounds[0].was_hit
            for before, after in pairwise(rounds):
                if is_served:
                    assert before.held_by is not None
                    assert after.was_hit == (16 in before.held_by)
                else:
                    assert after.was_hit == (played.player.variant.states != "true")
                    assert before.held_by is None


def test_a_text_that_ends_is_replayed_to_its_end(models: TinyModels, networks: DraftNetworks) -> None:
    stop = recorded(models, 0.0)[0].response_token_ids[9]
    text = recorded(models, 0.0, frozenset({stop}))[0]
    for played in play(networks, text, [Player(variant, GAMMA) for variant in ALL_VARIANTS], frozenset({stop})):
        committed = sum(r.ending.num_committed for r in played.rounds)
        assert committed == len(text.response_token_ids)  # all after the prefill's token, the stop token included
        assert played.rounds[-1].ending.anchor is None and played.rounds[-1].held_by is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_variants_and_budgets_that_share_a_replay_get_what_each_gets_alone(
    models: TinyModels, networks: DraftNetworks, temperature: float
) -> None:
    players = [Player(variant, gamma) for variant in ALL_VARIANTS for gamma in (2, GAMMA, 7)]
    text = recorded(models, temperature, max_tokens=16)[0]
    together = {played.player: played.rounds for played in play(networks, text, players)}
    for player in [Player(variant, gamma) for variant in SOME_VARIANTS for gamma in (2, 7)]:
        assert play(networks, text, [player])[0].rounds == together[player], player
    assert len({Tally.of(rounds).tau for rounds in together.values()}) > 3


def served_rounds(networks: DraftNetworks, text: TargetText, plan: PassPlan) -> list[tuple[Ending, bool]]:
    """The drafter's own rounds with a cache of one, whose noise is drawn as the replay draws it."""
    sequence = DraftSequence(networks, new_memory(networks, 128, GAMMA, 1), list(text.prompt_token_ids))
    layers = range(networks.decoder.first_layer, networks.target.num_layers)
    rule = SelectionRule(CALIBRATION, None, NO_STOPS)
    start, block, found = len(text.prompt_token_ids), None, []
    while start + 1 < len(text.token_ids):
        rows = text.states(networks.config.tap_layers, layers, sequence.num_rows, start)
        sequence.install(rows.taps, rows.decoder_kv)
        sequence.token_ids = text.token_ids[: start + 1]
        was_hit = block is not None
        block = block or fallback_block(sequence, GAMMA, noise_generator(NOISE_ID, start))
        ending = verify(block.token_ids, text.following(start, GAMMA))
        if ending is None:
            break
        assert ending.anchor is not None
        found.append((ending, was_hit))
        start += ending.num_accepted + 1
        round_ = DraftRound(sequence, block, plan, rule, noise_generator(NOISE_ID, start))
        for _ in round_.steps():
            pass
        block = round_.find(ending.num_accepted, ending.anchor)
    return found


@pytest.mark.parametrize("plan", [PassPlan(0, 0, 1), PassPlan(2, 0, 1), PassPlan(1, 1, 1), PassPlan(3, 3, 1)])
def test_a_replay_is_what_the_drafter_does(models: TinyModels, networks: DraftNetworks, plan: PassPlan) -> None:
    variant = Variant("served", plan.num_passes, "replace" if plan.num_refreshes else "none")
    hits = 0
    for text in recorded(models, 1.0):
        settings = ReplaySettings((Player(variant, GAMMA),), NO_STOPS, {GAMMA: CALIBRATION}, cache_size=1)
        (played,) = Replay(networks, text, settings, NOISE_ID).run()
        ours = [(r.ending, r.was_hit) for r in played.rounds]
        assert ours == served_rounds(networks, text, plan)
        hits += sum(was_hit for _, was_hit in ours)
    assert hits


def test_drafting_in_one_go_from_true_states_is_a_synchronous_method(models: TinyModels) -> None:
    networks = models.networks("causal_mask", with_adapter=False)
    method = SynchronousMethod(networks, GAMMA)
    for number, text in enumerate(recorded(models, 1.0)):
        (played,) = play(networks, text, [Player(Variant("true", 0), GAMMA)])
        assert played.rounds == replay_fallbacks(method, text, GAMMA, NO_STOPS, number)


def test_observed_rounds_carry_what_other_rules_need(models: TinyModels, networks: DraftNetworks) -> None:
    text = recorded(models, 0.0)[0]
    played, plain = play(
        networks, text, [Player(Variant("served", 1, "replace"), GAMMA, True), Player(Variant("served", 1), GAMMA)]
    )
    ranked = [r for r in played.rounds if r.held_by is not None]
    assert len(played.observed) == len(ranked) and not plain.observed
    for observed, replayed in zip(played.observed, ranked, strict=True):
        assert observed.num_accepted == replayed.ending.num_accepted
        assert len(observed.draft_anchors) == GAMMA
        rank = outcome_rank(observed, "served", CALIBRATION)
        assert sizes_that_hold(rank) == replayed.held_by


def test_without_a_calibration_the_decoder_alone_ranks(models: TinyModels, networks: DraftNetworks) -> None:
    text, player = recorded(models, 0.0)[0], Player(Variant("served", 1, "replace"), GAMMA, observed=True)
    (played,) = Replay(networks, text, ReplaySettings((player,), NO_STOPS)).run()
    ranks = [outcome_rank(observed, "uncalibrated", CALIBRATION) for observed in played.observed]
    assert [r.held_by for r in played.rounds if r.held_by is not None] == [sizes_that_hold(rank) for rank in ranks]


def test_a_bidirectional_block_is_drafted_at_one_budget(models: TinyModels) -> None:
    text = recorded(models, 0.0)[0]
    networks = models.networks("bidirectional", with_adapter=False)
    players = [Player(Variant("true", 0), 2), Player(Variant("true", 0), 4)]
    with pytest.raises(AssertionError, match="bidirectional"):
        play(networks, text, players)
