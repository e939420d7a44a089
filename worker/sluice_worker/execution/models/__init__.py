"""One decoder for every supported architecture: its config holds their differences."""
