import pytest
import torch

from decoding.uniforms import noise_generator, uniform


def test_uniforms_are_pinned_because_a_seed_is_a_promise_to_users() -> None:
    assert uniform(0, 0) == 0.36910132565434317
    assert uniform(2**63 - 1, 4095) == 0.22490374110399647


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    counts = [0] * 16
    for position in range(8000):
        value = uniform(1234, position)
        assert 0.0 <= value < 1.0
        counts[int(value * 16)] += 1
    chi_square = sum((count - 500) ** 2 / 500 for count in counts)
    assert chi_square < 37.7  # 15 degrees of freedom, p = 0.001


def test_seed_and_position_do_not_commute() -> None:
    assert uniform(3, 4) != uniform(4, 3)


def test_neighbouring_seeds_are_uncorrelated() -> None:
    first = torch.tensor([uniform(7, position) for position in range(4000)])
    second = torch.tensor([uniform(8, position) for position in range(4000)])
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) < 0.06


def test_arguments_outside_64_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        uniform(-1, 0)


def test_noise_repeats_for_one_sequence_and_differs_between_sequences() -> None:
    first = torch.rand(8, generator=noise_generator(5, 1))
    again = torch.rand(8, generator=noise_generator(5, 1))
    other = torch.rand(8, generator=noise_generator(5, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_noise_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    torch.rand(8, generator=noise_generator(5, 1))
    assert torch.equal(before, torch.random.get_rng_state())
