"""A real Kubernetes for the demo and the tests: found, made with kind, or built on this machine.

Standard library only: this runs before anything of ours is installed. Decisions (`choose`,
`render`, `content`) are pure; each thing of the machine is touched by one module.
"""
