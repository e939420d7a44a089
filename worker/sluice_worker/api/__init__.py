"""Requests under way, routes, formats, streams. API process, no torch."""
