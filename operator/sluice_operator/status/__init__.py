"""Status, conditions and events of an object, and the schema of the resource."""
