"""What the operator tells: status, conditions, events, and the schema of the resource."""
