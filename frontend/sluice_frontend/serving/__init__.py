"""Limits in force, admission, forecast, the admin routes. No torch."""
