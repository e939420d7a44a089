"""Live limits, admission, forecast, and requests under way. API process, no torch."""
