"""Requests under way, routes, formats, streams; binds ports. API process, no torch."""
