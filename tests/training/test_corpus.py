"""Reading corpora, refusing wrong ones, splitting them, and the states of the target on them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from modeling.target import Target, TargetBlock, TargetRunner
from tests.tiny.models import TAP_LAYERS, VOCAB_SIZE
from tests.training.texts import CPU, END_ID, States, make_texts, write_corpus_file
from training.corpus import (
    CorpusError,
    CorpusSequence,
    StateStore,
    batches,
    choose_sequences,
    frequent_tokens,
    read_corpus,
    split_corpus,
)


def test_texts_come_back(tmp_path: Path) -> None:
    texts = make_texts(3)
    write_corpus_file(tmp_path / "a.npz", texts[:2])
    write_corpus_file(tmp_path / "b.npz", texts[2:])
    corpus = read_corpus(tmp_path, VOCAB_SIZE, "", [END_ID])
    assert [sequence.token_ids.tolist() for sequence in corpus.sequences] == texts
    assert [sequence.index for sequence in corpus.sequences] == [0, 1, 2]
    assert [sequence.offset for sequence in corpus.sequences] == [0, len(texts[0]), len(texts[0]) + len(texts[1])]
    assert corpus.num_tokens == sum(map(len, texts))


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"holds no \.npz"):
        read_corpus(tmp_path, VOCAB_SIZE)


@pytest.mark.parametrize("keep", [0, 100, -40])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = write_corpus_file(tmp_path / "a.npz", make_texts(5))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorpusError, match=r"a\.npz is not a readable numpy archive"):
        read_corpus(tmp_path, VOCAB_SIZE)


def test_missing_arrays_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", tokens=np.zeros(3, np.uint16), offsets=np.array([0, 3]))
    with pytest.raises(CorpusError, match="lacks the arrays prompt_lens, temperatures"):
        read_corpus(tmp_path, VOCAB_SIZE)


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": np.array([0, 5])},
        {"offsets": np.array([], dtype=np.int64)},
        {"prompt_lens": np.array([2, 1000], dtype=np.int32)},
        {"prompt_lens": np.array([0, 2], dtype=np.int32)},
        {"temperatures": np.zeros(1, np.float32)},
    ],
)
def test_arrays_that_do_not_agree(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_corpus_file(tmp_path / "a.npz", make_texts(2), **changes)
    with pytest.raises(CorpusError, match=r"a\.npz: .* do not agree"):
        read_corpus(tmp_path, VOCAB_SIZE)


def test_larger_ids_mean_another_tokenizer(tmp_path: Path) -> None:
    write_corpus_file(tmp_path / "a.npz", [[5, 6, VOCAB_SIZE, END_ID]])
    with pytest.raises(CorpusError, match=f"holds token {VOCAB_SIZE}, the target has {VOCAB_SIZE}: another tokenizer"):
        read_corpus(tmp_path, VOCAB_SIZE)


def test_texts_that_never_end_mean_another_tokenizer(tmp_path: Path) -> None:
    write_corpus_file(tmp_path / "a.npz", make_texts(4))
    with pytest.raises(CorpusError, match="none of 4 texts ends"):
        read_corpus(tmp_path, VOCAB_SIZE, "", [END_ID + 1])


def test_tokenizer_hashes_are_compared(tmp_path: Path) -> None:
    write_corpus_file(tmp_path / "a.npz", make_texts(2), tokenizer=np.array("aaaa"))
    assert len(read_corpus(tmp_path, VOCAB_SIZE, "aaaa").sequences) == 2
    with pytest.raises(CorpusError, match="another tokenizer: aaaa, the target's is bbbb"):
        read_corpus(tmp_path, VOCAB_SIZE, "bbbb")


def test_other_answers_to_a_held_out_prompt_are_not_trained_on(tmp_path: Path) -> None:
    texts = make_texts(8)
    again = [[*text[:2], *text[4:]] for text in texts]
    write_corpus_file(tmp_path / "a.npz", texts + again)
    split = split_corpus(read_corpus(tmp_path, VOCAB_SIZE), 4)
    assert len(split.held_out) == 4
    held = {sequence.prompt for sequence in split.held_out}
    assert split.training
    assert held.isdisjoint(sequence.prompt for sequence in split.training)


def test_a_corpus_may_be_too_small(tmp_path: Path) -> None:
    write_corpus_file(tmp_path / "a.npz", make_texts(1))
    with pytest.raises(CorpusError, match="too few"):
        split_corpus(read_corpus(tmp_path, VOCAB_SIZE))


def test_trainings_choose_the_same_sequences(states: States) -> None:
    sequences = states.corpus.sequences

    def nothing(sequence: CorpusSequence) -> bool:
        return False

    first = choose_sequences(sequences, 30, nothing)
    chosen = {sequence.index for sequence in first}
    assert len(chosen) == 30
    # A training that starts later finds the first one's states, some or all of them, and ends up with the same set.
    for known in (set(), set(list(chosen)[:7]), chosen):
        later = choose_sequences(sequences, 30, lambda sequence, known=known: sequence.index in known)  # type: ignore[misc]
        assert [sequence.index for sequence in later] == [sequence.index for sequence in first]
    fewer = {sequence.index for sequence in choose_sequences(sequences, 10, nothing)}
    assert fewer < chosen
    assert choose_sequences(sequences, 0, nothing) == sequences
    others = choose_sequences(sequences, 30, nothing, skip=30)
    assert len(others) == 30
    assert not {sequence.index for sequence in others} & {sequence.index for sequence in first}
    with pytest.raises(CorpusError, match="not enough"):
        choose_sequences(sequences, 30, nothing, skip=len(sequences))


def test_states_are_the_targets_own(states: States, target_runner: TargetRunner) -> None:
    sequences = states.corpus.sequences[10:13]
    batch = states.store.batch(sequences, CPU)
    for row, sequence in enumerate(sequences):
        block = TargetBlock(target_runner.new_cache(), 0, sequence.token_ids.tolist())
        rows = target_runner.forward([block])
        length = sequence.length
        torch.testing.assert_close(batch.taps[row, :length], rows.taps, rtol=0.02, atol=0.02)
        logits = F.linear(batch.last[row, :length], target_runner.target.head)
        torch.testing.assert_close(logits, rows.logits, rtol=0.03, atol=0.1)
        assert torch.equal(batch.taps[row, length:], torch.zeros_like(batch.taps[row, length:]))


def test_states_are_computed_once(states: States, target: Target, tmp_path: Path) -> None:
    store = StateStore(states.corpus, target, TAP_LAYERS, tmp_path)
    sequences = states.corpus.sequences[:4]
    assert not any(store.has(sequence) for sequence in sequences)
    first = store.batch(sequences, CPU)
    again = StateStore(states.corpus, target, TAP_LAYERS, tmp_path)
    assert [again.has(sequence) for sequence in states.corpus.sequences[:5]] == [True] * 4 + [False]
    again._compute = None  # type: ignore[method-assign, assignment]  # a second computation would fail
    second = again.batch(sequences, CPU)
    assert torch.equal(first.taps, second.taps)
    assert torch.equal(first.last, second.last)


def test_states_of_other_targets_are_kept_apart(states: States, target: Target, tmp_path: Path) -> None:
    store = StateStore(states.corpus, target, TAP_LAYERS, tmp_path, "one")
    store.batch(states.corpus.sequences[:1], CPU)
    other = StateStore(states.corpus, target, TAP_LAYERS, tmp_path, "two")
    assert store.has(states.corpus.sequences[0])
    assert not other.has(states.corpus.sequences[0])


def test_an_epoch_holds_every_sequence_once_in_small_batches(states: States) -> None:
    sequences = states.corpus.sequences
    groups = list(batches(sequences, 100, np.random.default_rng(0)))
    assert sorted(sequence.index for group in groups for sequence in group) == list(range(len(sequences)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(sequence.length for sequence in group) <= 100


def test_frequent_tokens_of_responses(tmp_path: Path) -> None:
    write_corpus_file(tmp_path / "a.npz", [[50, 50, 7, 7, 7, 9, 9, 8]])
    corpus = read_corpus(tmp_path, VOCAB_SIZE)
    assert frequent_tokens(corpus, 3, VOCAB_SIZE, [1]).tolist() == [1, 7, 9]
