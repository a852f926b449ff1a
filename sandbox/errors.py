"""Failures of the sandbox that a person can understand and mend."""


class SandboxError(Exception):
    """The text says what failed and what to do; the command prints it and exits with `exit_code`."""

    exit_code = 1


class UsageError(SandboxError):
    """An option or argument is wrong."""

    exit_code = 2


class BuildError(SandboxError):
    """A step of building the cached parts failed."""


class StartError(SandboxError):
    """The cluster did not come up."""


class NotRunningError(SandboxError):
    """The command needs an instance that is up."""
