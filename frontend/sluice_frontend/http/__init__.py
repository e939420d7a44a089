"""Guards between the network and the API: connections, bodies, keys. No torch."""
