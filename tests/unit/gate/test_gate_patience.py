"""A long prefill is no hang, whatever the device; a hang is found in a bounded time."""

import pytest
from sluice_gate.engine.patience import MOST_S, Patience

TIMEOUT_S = 30.0


def taught(seconds_per_token: float, *prompts: int) -> Patience:
    """A device that computes at this speed, and has shown prompts, one after the other."""
    patience = Patience()
    for tokens in prompts:
        patience.learn(seconds_per_token * tokens, [tokens])
    return patience


@pytest.mark.parametrize("seconds_per_token", [1e-4, 6e-3, 5e-2])
@pytest.mark.parametrize("shown", [(), (300,), (1000, 4000), (20,) * 100])
@pytest.mark.parametrize("prompts", [[8192], [8192, 200], [100_000]])
def test_a_prefill_as_slow_as_the_device_is_explained(
    seconds_per_token: float, shown: tuple[int, ...], prompts: list[int]
) -> None:
    """6 ms: a text of 8 k tokens takes 50 s; 50 ms: a model of 7 B on two cores."""
    silent_s = min(seconds_per_token * sum(prompts), MOST_S)
    patience = taught(seconds_per_token, *shown)
    assert silent_s < TIMEOUT_S + patience.allowance_s(prompts)


def test_eight_prompts_that_are_computed_together_are_silent_for_their_sum() -> None:
    """Ollama takes a batch from each in turn, so that all are done at the end."""
    seconds = 8 * 8192 * 6e-3
    for patience in (Patience(), taught(6e-3, 8192)):
        assert seconds < TIMEOUT_S + patience.allowance_s([8192] * 8)


def test_prompts_that_were_cached_do_not_hide_how_slow_the_device_is() -> None:
    patience = taught(1e-5, *(4000,) * 1000)
    assert TIMEOUT_S + patience.allowance_s([8192]) > 8192 * 6e-3


def test_a_hang_while_a_fast_engine_computes_prompts_is_found_in_time() -> None:
    patience = taught(1e-4, 1000, 2000)
    assert Patience().allowance_s([]) == patience.allowance_s([]) == 0.0
    assert patience.allowance_s([1000]) <= 20.0
    assert patience.allowance_s([1000] * 32) <= 20.0


def test_one_slow_moment_is_forgotten() -> None:
    patience = Patience()
    patience.learn(60.0, [300])  # it compiled its kernels
    assert patience.allowance_s([8192]) == MOST_S
    for _ in range(500):
        patience.learn(0.1, [300])
    assert patience.allowance_s([8192]) < 200.0


def test_no_prompt_explains_silence_for_ever() -> None:
    assert Patience().allowance_s([10**9]) == MOST_S
