"""Request and response types of the HTTP API, both ways. API process, no torch."""
