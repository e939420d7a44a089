"""Services that are drawn: that they can be simulated, and what is told of them."""

from pathlib import Path

import pytest
from bench.drawn_services import drawn, picture, run, summary, told


def test_a_seed_is_a_service_that_can_run() -> None:
    kinds = set()
    for seed in range(200):
        of = drawn(seed)
        assert of == drawn(seed)
        assert of.params.kv_tokens >= 7.9 * (of.lengths.prompt + of.lengths.output)
        kinds.add((of.trace, tuple(of.targets.by_name()), of.params.interference_every_s > 0))
    assert len(kinds) > 40


def test_the_best_cap_is_no_worse_than_the_largest(tmp_path: Path) -> None:
    rows = [run((seed, 200)) for seed in (1, 5)]
    found = summary(rows)
    for row in rows:
        assert row["best"]["smooth_share"] >= row["max"]["smooth_share"]
    ours = sum(row["ours"]["smooth_share"] for row in rows) / 2
    assert found["smooth_share"]["ours"] == pytest.approx(ours)
    assert f"smooth, mean of the services | {100 * ours:.1f} %" in told(found)
    picture(rows, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 5000
