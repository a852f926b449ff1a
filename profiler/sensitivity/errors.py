"""What can go wrong when a job's appetite for CPU and memory is measured."""

from muri.errors import UsageError


class SensitivityError(UsageError):
    """Asked for, or measured, something from which no sensitivity follows."""


class CpuLimitError(SensitivityError):
    """More CPUs were asked for than there are."""


class StorageError(SensitivityError):
    """The bandwidth of a dataset's storage cannot be measured."""


class NoSuchSensitivityError(SensitivityError):
    """Nothing is stored under the name."""
