"""A real Kubernetes for the demo and the tests: found, made with kind, or built on this machine.

Standard library only: this runs before anything of ours is installed. What decides (`choose`,
`render`, `content`) is pure; what touches the machine is one module per thing touched.
"""
