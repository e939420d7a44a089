"""Puts evidence, model, demand and causes together: the decision table of the design, section 6."""

from .types import Decision, Observation, Past


def decide(past: Past, observation: Observation) -> tuple[Past, Decision]:
    """What the cap and the replicas shall be, and why; `past` is what to hand in next time."""
    raise NotImplementedError
