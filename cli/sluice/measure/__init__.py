"""What `load` and `bench` measure with: a client, the server under test, the curve over caps."""
