"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("no deadline", settings(deadline=None))  # another process may have the processor for a while
settings.load_profile("no deadline")
