"""One decoder for every supported architecture: what differs between them is in its config."""
