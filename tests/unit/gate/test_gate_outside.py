"""The step model from outside finds what made the gaps, and follows it."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.contract import StepModel, decode, encode
from sluice_gate.count.outside import MIN_GAPS, MIN_PREFILLS, OutsideModel

Law = tuple[float, float, float]


class Engine:
    """Steps of `a + b * decodes + d * tokens` ms with log-normal noise, in virtual time."""

    def __init__(self, model: OutsideModel, seed: int = 1, noise: float = 0.05) -> None:
        self.model, self.random, self.noise, self.now_s = model, random.Random(seed), noise, 0.0
        self.fits: list[StepModel | None] = []

    def run(
        self,
        law: Law,
        seconds: float,
        loads: Callable[[random.Random], int] = lambda r: r.randint(1, 32),
        sizes: Callable[[random.Random], int] = lambda r: r.randint(20, 2000),
    ) -> StepModel | None:
        """A prompt each half second; a fit each second; the last fit."""
        (a, b, d), end_s, due_s = law, self.now_s + seconds, self.now_s
        while self.now_s < end_s:
            decodes = loads(self.random)
            gap_ms = (a + b * decodes) * self._factor()
            self.now_s += gap_ms / 1e3
            for _ in range(decodes):
                self.model.gap(gap_ms, decodes, self.now_s)
            if self.now_s >= due_s:
                due_s, tokens = due_s + 0.5, sizes(self.random)
                prefill_ms = (a + b * decodes + d * tokens) * self._factor()
                self.now_s += prefill_ms / 1e3
                self.model.prefill(prefill_ms, tokens, decodes, self.now_s)
                self.fits.append(self.model.fit(self.now_s))
        return self.fits[-1]

    def _factor(self) -> float:
        return math.exp(self.random.gauss(0, self.noise))


@pytest.fixture
def engine() -> Engine:
    return Engine(OutsideModel())


def assert_close(model: StepModel | None, law: Law, by: float = 0.1) -> None:
    assert model is not None
    assert model.c == 0
    for decodes in (1, 8, 32):
        assert model.step_ms(decodes, 0, 0) == pytest.approx(law[0] + law[1] * decodes, rel=by)
    assert model.d == pytest.approx(law[2], rel=by)


@settings(max_examples=15, deadline=None)
@given(st.floats(2, 60), st.floats(0.05, 3), st.floats(0.02, 1), st.integers(0, 2**16))
def test_known_coefficients_are_found(a: float, b: float, d: float, seed: int) -> None:
    model = Engine(OutsideModel(), seed).run((a, b, d), 60)
    assert_close(model, (a, b, d))
    assert model is not None
    assert model.a == pytest.approx(a, rel=0.1, abs=0.3 * b)
    assert model.b == pytest.approx(b, rel=0.1, abs=0.003 * a)
    assert 1.08 < model.resid_q < 1.25  # exp(2.33 * 0.05) = 1.12


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e5), st.integers(1, 64), st.floats(0, 1e5), st.integers(0, 9999)),
        min_size=10,
        max_size=40,
    ),
    st.floats(0, 600),
)
def test_no_coefficient_is_negative_and_all_are_finite(
    records: list[tuple[float, int, float, int]], pause_s: float
) -> None:
    model, now_s = OutsideModel(), 0.0
    for _ in range(12):
        now_s += pause_s
        for gap_ms, decodes, prefill_ms, tokens in records:
            model.gap(gap_ms, decodes, now_s)
            model.prefill(prefill_ms, tokens, decodes, now_s)
        if (fitted := model.fit(now_s)) is not None:
            numbers = (fitted.a, fitted.b, fitted.c, fitted.d, fitted.resid_q)
            assert all(0 <= number < math.inf for number in numbers)


def test_there_is_no_model_before_there_is_enough() -> None:
    model = OutsideModel()
    assert model.fit(0.0) is None
    for i in range(MIN_PREFILLS):
        model.prefill(30.0 + i, 100 * (i + 1), 2, 1.0)
    for i in range(MIN_GAPS):
        assert model.fit(1.0) is None
        model.gap(10.0, 1 + i % 4, 1.0)
    assert model.fit(1.0) is not None


def test_there_is_no_model_without_prefills_of_different_sizes() -> None:
    model = OutsideModel()
    for i in range(MIN_GAPS):
        model.gap(10.0, 1 + i % 4, 1.0)
    for _ in range(50):
        model.prefill(30.0, 100, 2, 1.0)
    assert model.fit(1.0) is None
    for _ in range(50):
        model.prefill(50.0, 200, 2, 1.0)
    assert model.fit(1.0) is not None


def test_one_load_alone_gives_no_model(engine: Engine) -> None:
    assert engine.run((10.0, 0.5, 0.1), 60, loads=lambda r: 16) is None


@pytest.mark.parametrize("new", [(20.0, 1.0, 0.2), (5.0, 0.25, 0.05), (10.0, 1.5, 0.1)])
def test_another_regime_is_followed_within_three_minutes(engine: Engine, new: Law) -> None:
    assert_close(engine.run((10.0, 0.5, 0.1), 120), (10.0, 0.5, 0.1))
    assert_close(engine.run(new, 180), new)


def test_at_one_load_the_shape_stays_and_the_level_follows(engine: Engine) -> None:
    engine.run((10.0, 0.5, 0.1), 120)
    model = engine.run((10.0, 0.5, 0.1), 300, loads=lambda r: 16)
    assert_close(model, (10.0, 0.5, 0.1))
    model = engine.run((20.0, 1.0, 0.1), 180, loads=lambda r: 16)
    assert_close(model, (20.0, 1.0, 0.1))


def test_a_pause_forgets_nothing(engine: Engine) -> None:
    engine.run((10.0, 0.5, 0.1), 60)
    engine.now_s += 3600
    assert_close(engine.model.fit(engine.now_s), (10.0, 0.5, 0.1))
    engine.run((10.0, 0.5, 0.1), 2)
    assert_close(engine.fits[-1], (10.0, 0.5, 0.1))


def test_a_stall_of_all_sequences_is_no_speed(engine: Engine) -> None:
    engine.run((10.0, 0.5, 0.1), 60)
    for _ in range(32):
        engine.model.gap(30_000.0, 32, engine.now_s)
    assert_close(engine.model.fit(engine.now_s), (10.0, 0.5, 0.1))


def test_chunks_that_arrive_together_do_not_drown_the_others() -> None:
    engine = Engine(OutsideModel())
    for _ in range(60):
        engine.run((10.0, 0.5, 0.1), 1)
        engine.model.gap(0.0, 8, engine.now_s)
        engine.model.gap(0.01, 16, engine.now_s)
    assert_close(engine.fits[-1], (10.0, 0.5, 0.1))


def test_a_few_prompts_that_waited_do_not_move_the_prefill(engine: Engine) -> None:
    engine.run((10.0, 0.5, 0.1), 60)
    for _ in range(10):
        engine.model.prefill(20_000.0, 500, 32, engine.now_s)
    assert_close(engine.model.fit(engine.now_s), (10.0, 0.5, 0.1))


EDGES = st.sampled_from([0.0, 1e-9, 1.0, 1e3, 86_400_000.0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(EDGES, st.sampled_from([0, 1, 7, 1 << 30]), EDGES), min_size=10))
def test_gaps_and_prompts_at_their_edges_give_a_model_that_can_be_told(
    records: list[tuple[float, int, float]],
) -> None:
    model, now_s = OutsideModel(), 0.0
    for gap_ms, decodes, tokens in records * 20:
        now_s += 1.0
        model.gap(gap_ms, decodes, now_s)
        model.prefill(gap_ms, tokens * 1e6, decodes, now_s)
        fitted = model.fit(now_s)
        assert fitted is None or decode(encode(fitted), StepModel) == fitted
