"""The pods' admin ports: reading evidence, sending live limits."""
