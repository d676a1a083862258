"""Predictions for tests that look at one reading of a job, not at what it may be besides.

Where no framework is named, ``simulate`` runs the job again by the conventions of each: ten times the work,
which ``test_intervals.py`` and tests of the command line look at.
"""

from functools import partial

from foretrace.simulator.simulate import simulate as _simulate

simulate = partial(_simulate, covers_unsaid=False)
"""``foretrace.simulator.simulate.simulate`` of a job as it is."""
