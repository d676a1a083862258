"""Errors a user can cause with a machine description.

TopologyError
├── UnitError      a quantity without a unit, or with one nobody knows
├── CatalogError   a name that is not in the catalogue, a file that does not describe a machine
└── FabricError    a fabric that cannot carry traffic: a GPU that no link reaches, a link of no bandwidth

Each message says what is wrong, the value, and what would work. Only the root command catches them.
"""


class TopologyError(ValueError):
    """Base of what a user can get wrong with machines; shown as one line, exit status 2."""


class UnitError(TopologyError):
    """A quantity has no unit, or one that nobody knows."""


class CatalogError(TopologyError):
    """A machine or device is not in the catalogue, or its file does not describe one."""


class FabricError(TopologyError):
    """A fabric cannot carry traffic between its GPUs."""
