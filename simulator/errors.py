"""Errors a user can cause with a simulation.

Each message says what is wrong, the value, and what would work. Only the root command catches them.
"""


class SimulationError(ValueError):
    """Base of what a user can get wrong with a simulation; shown as one line, exit status 2."""


class ModelError(SimulationError):
    """A model is unknown, or its description is not complete."""


class JobError(SimulationError):
    """A layout, batch or option cannot run on these GPUs."""


class ScheduleError(SimulationError):
    """A pipeline schedule does not allow these stages or micro-batches."""


class ConfigError(SimulationError):
    """A file of settings, or a setting, cannot be understood."""


class LikeError(SimulationError):
    """A run does not tell what simulating one like it, or calibrating on it, needs to know."""


class CalibrationError(SimulationError):
    """A run that says nothing of the machine, or a calibration file that cannot be used."""


class GoodputError(SimulationError):
    """Training cannot be planned with these failures, checkpoints or this budget."""


class SearchError(SimulationError):
    """The workers of a search cannot be reached, or are lost again and again."""


class TableError(SimulationError):
    """A table of measurements, or a cell of it, cannot be used."""


class EngineError(SimulationError):
    """An engine does not exist, or needs a package that is not installed."""


class ProgramError(SimulationError):
    """A program cannot run to its end."""
