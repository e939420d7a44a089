"""The tools of `load` and `bench`: a client, the server under test, the curve over caps."""
