"""`sluice from`: a manifest of an engine, as the InferenceService that says the same.

The code here is pure but `command`, which reads the file, and `checks`, which loads what evaluates
the CRD's rules. Each rule takes out of the pod's template what it says in the object. What is left
becomes `spec.podTemplate`, and what that cannot hold is a line.
"""

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
