"""What every test shares: property tests are deterministic, and patient with a loaded machine."""

from hypothesis import settings

settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")
