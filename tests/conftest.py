"""What every test shares: property tests are deterministic, and patient with a loaded machine.

Recordings use the hooks in Python, whatever was compiled here before, unless a test asks for those in C++.
"""

import os

from hypothesis import settings

from tracer.native.build import SWITCH

settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")
os.environ[SWITCH] = "0"
