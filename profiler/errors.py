"""The errors of the store, and of measurements. Their texts are for people."""

from pathlib import Path

from muri.errors import MuriError, UsageError


class StoreError(MuriError):
    """The profile store cannot be used."""


class StoreMissingError(StoreError):
    """There is no store at the path."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"there is no profile store at {path}. The controller makes it with the first measurement; "
            "another place can be given with --store or MURI_PROFILES"
        )


class StorePermissionError(StoreError):
    """The user may not read or write the store."""

    def __init__(self, path: Path, action: str) -> None:
        super().__init__(
            f"no permission to {action} the profile store {path}. Run the command as the user that owns it "
            "(root or SlurmUser), or give your own with --store or MURI_PROFILES"
        )


class StoreBusyError(StoreError):
    """Another process kept the store locked for too long."""

    def __init__(self, path: Path, waited_s: float) -> None:
        super().__init__(
            f"the profile store {path} was locked by another process for {waited_s:.0f} s. "
            f"Nothing was changed; try again, or see who holds it with `fuser {path}`"
        )


class CorruptStoreError(StoreError):
    """The store's file is damaged.

    Attributes:
        path: The file.
        detail: The damage that was found.
    """

    def __init__(self, path: Path, detail: str, text: str = "") -> None:
        self.path = path
        self.detail = detail
        super().__init__(
            text
            or f"the profile store {path} is damaged ({detail}). Nothing was changed. Look at it with `muri doctor "
            f"--store {path}` and set it aside with `muri doctor --store {path} --set-aside`, which renames it: "
            "models are then measured again, or read an export with `muri profile import`"
        )


class NoStoreError(CorruptStoreError):
    """The file is text, so it never was a store, or nothing is left of the one that it was."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path,
            "it is a text file",
            f"{path} is a text file, no profile store: --store takes the database that the controller keeps as "
            f"profiles.db in its state directory. If this should be that one, `muri doctor --store {path} --set-aside` "
            "renames it; exported profiles are read with `muri profile import`",
        )


class StoreVersionError(StoreError):
    """The store was made by a newer version, or by another program."""


class StoreOutdatedError(StoreVersionError):
    """The store is of an older format and was opened only to read."""


class JournalChoiceError(StoreError, UsageError):
    """The user asked for a journal mode that does not exist."""

    exit_code = UsageError.exit_code


class ExchangeError(UsageError):
    """A file of exported profiles cannot be understood."""


class NoSuchProfileError(UsageError):
    """No profile, or more than one, matches the request."""


class NotPublishableError(UsageError):
    """Profiles cannot be published together."""


class InterferenceError(UsageError):
    """A record of two models side by side holds a figure that no measurement can give."""


class FitError(UsageError):
    """The points do not determine the line."""


class SensitivityError(UsageError):
    """No sensitivity follows from what the user asked for, or from what was measured."""
