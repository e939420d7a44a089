"""Measurements of requests and steps: ticks, lengths, metrics, health. API process, no torch."""
