"""An example of a property test has no deadline, as others share the machine."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
