"""Request and response types of the HTTP API, both ways. No torch."""
