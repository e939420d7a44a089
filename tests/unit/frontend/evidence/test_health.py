"""Live is idle or moving; busy is not dead."""

import pytest
from sluice_core.contract import Hung
from sluice_frontend.evidence.health import LOADING_TIMEOUT_S, Liveness

TIMEOUT_S = 10.0


def create_liveness() -> Liveness:
    """A serving engine at time 0."""
    engine_liveness = Liveness(0.0)
    engine_liveness.serving(0.0)
    return engine_liveness


def test_a_start_is_live_but_not_ready_and_says_how_far_it_is() -> None:
    engine_liveness = Liveness(0.0)
    engine_liveness.starting("weights", 40, 1.0)
    assert engine_liveness.liveness(600.0, TIMEOUT_S).ok
    ready = engine_liveness.readiness(600.0, TIMEOUT_S)
    assert (ready.ok, ready.phase, ready.percent) == (False, "weights", 40)


def test_a_start_of_which_nothing_is_heard_any_more_is_not_live() -> None:
    engine_liveness = Liveness(0.0)
    engine_liveness.starting("weights", 40, 1000.0)
    assert engine_liveness.liveness(1000.0 + LOADING_TIMEOUT_S, TIMEOUT_S).ok
    verdict = engine_liveness.liveness(1001.0 + LOADING_TIMEOUT_S, TIMEOUT_S)
    assert (verdict.ok, verdict.phase, verdict.percent) == (False, "weights", 40)


def test_an_idle_engine_is_live_as_long_as_it_beats() -> None:
    engine_liveness = create_liveness()
    for second in range(1, 100):
        engine_liveness.beat(0, False, float(second))
    assert engine_liveness.liveness(100.0, TIMEOUT_S).ok
    assert not engine_liveness.liveness(99.0 + TIMEOUT_S + 0.1, TIMEOUT_S).ok


@pytest.mark.parametrize(("waited_s", "live", "ready"), [(4, 1, 1), (6, 1, 0), (11, 0, 0)])
def test_work_without_a_step_costs_readiness_then_liveness(
    waited_s: float, live: bool, ready: bool
) -> None:
    engine_liveness = create_liveness()
    engine_liveness.work_arrived(0.0)
    engine_liveness.beat(0, True, float(waited_s))
    assert engine_liveness.liveness(waited_s, TIMEOUT_S).ok == live
    assert engine_liveness.readiness(waited_s, TIMEOUT_S).ok == ready


def test_an_engine_that_was_idle_for_long_owes_a_step_only_from_the_new_work_on() -> None:
    engine_liveness = create_liveness()
    engine_liveness.beat(7, False, 1000.0)
    engine_liveness.work_arrived(1000.5)
    assert engine_liveness.readiness(1004.0, TIMEOUT_S).ok


def test_steps_keep_a_busy_engine_live() -> None:
    engine_liveness = create_liveness()
    engine_liveness.work_arrived(0.0)
    for second in range(9, 100, 9):
        engine_liveness.stepped(float(second))
    assert engine_liveness.liveness(100.0, TIMEOUT_S).ok


def test_a_hung_engine_is_told_with_since_when_in_a_sentence_that_stays() -> None:
    engine_liveness = Liveness(100.0, created_s=1_000_000_000.0)
    engine_liveness.serving(103.0)
    engine_liveness.beat(0, False, 110.0)
    engine_liveness.work_arrived(110.0)
    assert engine_liveness.hung(115.0, TIMEOUT_S) is None
    sentence = "the engine process is hung: no step, though there is work, since "
    since = Hung(1_000_000_010.0, sentence + "2001-09-09T01:46:50Z")
    assert engine_liveness.hung(116.0, TIMEOUT_S) == engine_liveness.hung(190.0, TIMEOUT_S) == since
    verdict = engine_liveness.liveness(151.0, TIMEOUT_S)
    assert (verdict.phase, verdict.reason) == ("hung", f"{since.reason} (41 s)")
    engine_liveness.stepped(191.0)
    assert engine_liveness.hung(191.0, TIMEOUT_S) is None


def test_an_idle_engine_that_is_silent_is_hung_and_one_that_ended_is_not() -> None:
    engine_liveness = Liveness(0.0, created_s=1_000_000_000.0)
    engine_liveness.serving(0.0)
    hung = engine_liveness.hung(6.0, TIMEOUT_S)
    assert hung is not None
    assert "no sign of life since 2001-09-09T01:46:40Z" in hung.reason
    engine_liveness.died("the engine process ended")
    assert engine_liveness.hung(6.0, TIMEOUT_S) is None


def test_silence_that_prompts_explain_is_no_hang_and_silence_beyond_it_is_one() -> None:
    engine_liveness = create_liveness()
    engine_liveness.beat(0, True, 1.0, allowance_s=50.0, is_heard=False)
    for probe in (engine_liveness.liveness, engine_liveness.readiness):
        assert probe(54.9, TIMEOUT_S).ok
    assert engine_liveness.hung(56.1, TIMEOUT_S) is not None
    assert not engine_liveness.liveness(61.1, TIMEOUT_S).ok


def test_an_engine_that_moves_is_live_also_when_nobody_hears_its_health() -> None:
    engine_liveness = create_liveness()
    for second in range(1, 100):
        engine_liveness.beat(second, True, float(second), is_heard=False)
    assert engine_liveness.liveness(99.0, TIMEOUT_S).ok


def test_silence_of_an_engine_that_has_served_is_a_hang_until_it_tells_of_a_new_start() -> None:
    engine_liveness = Liveness(0.0, has_served=True)
    assert engine_liveness.liveness(9.0, TIMEOUT_S).ok
    assert not engine_liveness.readiness(1.0, TIMEOUT_S).ok
    assert engine_liveness.liveness(11.0, TIMEOUT_S).phase == "hung"
    engine_liveness.starting("process", 0, 12.0)
    assert engine_liveness.liveness(100.0, TIMEOUT_S).ok


def test_a_dead_engine_is_neither_live_nor_ready_at_once() -> None:
    engine_liveness = create_liveness()
    engine_liveness.died("the engine process ended")
    for verdict in (
        engine_liveness.liveness(0.0, TIMEOUT_S),
        engine_liveness.readiness(0.0, TIMEOUT_S),
    ):
        assert (verdict.ok, verdict.reason) == (False, "the engine process ended")


def test_an_engine_is_up_from_its_start_to_its_end_also_while_it_drains() -> None:
    """What vLLM's clients take for readiness."""
    engine_liveness = Liveness(0.0)
    engine_liveness.starting("weights", 40, 1.0)
    up = engine_liveness.health(600.0, TIMEOUT_S)
    assert (up.ok, up.reason) == (False, "starting: weights")
    engine_liveness.serving(600.0)
    engine_liveness.is_draining = True
    assert engine_liveness.health(601.0, TIMEOUT_S).ok
    engine_liveness.died("the engine process ended")
    assert not engine_liveness.health(601.0, TIMEOUT_S).ok


def test_draining_is_live_and_not_ready() -> None:
    engine_liveness = create_liveness()
    engine_liveness.is_draining = True
    assert engine_liveness.liveness(1.0, TIMEOUT_S).ok
    assert not engine_liveness.readiness(1.0, TIMEOUT_S).ok
