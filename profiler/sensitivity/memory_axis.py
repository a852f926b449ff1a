"""What a person says about a dataset, and what is measured of the rest."""

from dataclasses import dataclass, replace
from pathlib import Path

from muri.profiler.sensitivity.cache_model import Dataset
from muri.profiler.sensitivity.errors import SensitivityError
from muri.profiler.sensitivity.storage import files_of, measure_bandwidth, size_gib


@dataclass(frozen=True, slots=True)
class MemoryAxis:
    """How the memory axis is to be computed.

    Attributes:
        batch_mib: What one iteration reads.
        path: The dataset's files; None where size and bandwidth are given.
        dataset_gib: Size of the dataset; None: that of its files.
        storage_mib_per_s: Bandwidth of its storage; None: measured on its files.
        overlap: Share of reading that the job hides; None: as its dry run shows.
    """

    batch_mib: float
    path: Path | None = None
    dataset_gib: float | None = None
    storage_mib_per_s: float | None = None
    overlap: float | None = None

    @classmethod
    def from_options(
        cls,
        path: Path | None,
        dataset_gib: float | None,
        storage_mib_per_s: float | None,
        batch_mib: float | None,
        overlap: float | None,
    ) -> "MemoryAxis | None":
        """The axis that the options mean, None where none was given.

        Raises:
            SensitivityError: Some are given, but not enough.
        """
        given = (path, dataset_gib, storage_mib_per_s, batch_mib, overlap)
        if all(value is None for value in given):
            return None
        missing = []
        if batch_mib is None:
            missing.append("--batch-mib (batch size × mean size of a sample)")
        if path is None and dataset_gib is None:
            missing.append("--dataset or --dataset-gib")
        if path is None and storage_mib_per_s is None:
            missing.append("--dataset or --storage-mib-per-s")
        if batch_mib is None or missing:
            raise SensitivityError(f"the memory axis also needs {', '.join(dict.fromkeys(missing))}")
        return cls(batch_mib, path, dataset_gib, storage_mib_per_s, overlap)

    def measure(self) -> Dataset:
        """Measure what was not said.

        Raises:
            StorageError: The files cannot be read.
            SensitivityError: What was said cannot be true.
        """
        files = () if self.path is None else files_of(self.path)
        gib = size_gib(files) if self.dataset_gib is None else self.dataset_gib
        rate = measure_bandwidth(files).mib_per_s if self.storage_mib_per_s is None else self.storage_mib_per_s
        return Dataset(gib, self.batch_mib, rate, 1.0 if self.overlap is None else self.overlap)

    def with_overlap(self, dataset: Dataset, measured: float | None) -> Dataset:
        """The dataset with the overlap that its job showed; what a person said counts more.

        Where nothing was said and nothing could be seen, reading is taken to overlap, as it does
        with a loader that has workers.
        """
        return dataset if self.overlap is not None or measured is None else replace(dataset, overlap=measured)
