"""Live limits, admission and forecast. No torch."""
