"""Takes over traces of other tools as runs: what they hold is translated, nothing is made up.

``tracer.ingest.ingest.ingest`` is the entry. A reader per kind of file turns it into *recordings*, one per
rank (``tracer.ingest.recording``); ``tracer.ingest.joining`` then numbers communication so that ranks can be
joined, and puts them on one clock. docs/ingest.md describes the files and what is inferred.
"""
