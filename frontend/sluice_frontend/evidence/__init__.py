"""Measurements of requests and steps: ticks, lengths, metrics, health. No torch."""
