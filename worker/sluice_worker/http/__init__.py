"""Guards between the network and the API: connections, bodies, keys. API process, no torch."""
