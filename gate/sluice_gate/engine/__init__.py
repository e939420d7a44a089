"""The engine behind the gate: as data, its server, its own live cap, and what it owes."""
