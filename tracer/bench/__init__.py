"""The health check of a machine: what its parts do against what they promise."""
