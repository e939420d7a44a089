"""A long steady run exactly at the limit: the tuner must not fidget."""

from collections import deque
from random import Random

from sluice_core.contract import TICK_RING, Tick, Waiting
from sluice_operator.tuner import Past, decide
from unit.operator.tuner.made import gaps, late, observation, pod, tick

HOURS = 24
TICKS_PER_HOUR = 1800
LOOK_TICKS = 5
"""In life every tick is looked at, which takes minutes here; each hour has its looks at others."""


def at_the_limit(random: Random, seq: int, cap: int, epoch: int) -> Tick:
    """1 % of the gaps over, whole steps at once, and 1 % of the first tokens; the cap in use."""
    slow_steps = sum(random.random() < 0.01 for _ in range(125))
    slow_starts = sum(random.random() < 0.01 for _ in range(10))
    return tick(
        seq,
        epoch=epoch,
        cap=cap,
        max_running=cap,
        itl=gaps(125 * cap, slow_steps * cap),
        ttft=late(10, slow_starts),
        waiting=Waiting(cap=1),
    )


def test_a_share_at_the_limit_all_day_changes_the_cap_less_than_once_an_hour() -> None:
    random, ring, past = Random(1), deque[Tick](maxlen=TICK_RING), Past()
    cap, epoch, changes = 8, 1, list[tuple[float, int, str]]()
    for seq in range(1, HOURS * TICKS_PER_HOUR):
        ring.append(at_the_limit(random, seq, cap, epoch))
        if seq % LOOK_TICKS:
            continue
        view = pod("a", ring, epoch=epoch)
        past, decision = decide(past, observation(view, cap=cap, epoch=epoch))
        assert decision.replicas == 1
        if decision.cap != cap:
            cap, epoch = decision.cap, epoch + 1
            changes.append((seq / TICKS_PER_HOUR, cap, decision.cap_reason))
    print(f"{len(changes)} changes in {HOURS} h: {changes}")
    assert len(changes) <= HOURS
