"""sweep.json: the command line of a sweep, and what the index of runs shows for it."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from stoker.runs.directory import SWEEP
from stoker.runs.json_files import read_record, write_json
from stoker.runs.result import Best


@dataclass
class SweepRecord:
    """The contents of sweep.json. A field is None if it is unknown.

    For a grid, `searched` (the keys with a range) is None. The fields from `started` on are for the
    index. `best` and `test` are means over the `best_jobs`, which differ only by seed or fold.
    """

    typed: list[str] | None = None  # the command line
    jobs: int | None = None
    searched: list[str] | None = None
    started: float | None = None
    total: int = 0  # jobs, including those that have not begun
    ended: int = 0
    failed: int = 0
    seconds: float | None = None
    best_jobs: list[str] = field(default_factory=list)
    best: Best | None = None
    test: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "SweepRecord":
        return read_record(folder / SWEEP, cls)

    def write(self, folder: Path) -> None:
        write_json(folder / SWEEP, asdict(self))
