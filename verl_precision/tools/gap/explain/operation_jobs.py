"""Work whose results are files: what vLLM's operations got and gave, and how they compare with transformers'."""

from abc import abstractmethod
from pathlib import Path

from verl_precision.tools.engines.engine import Request, Response
from verl_precision.tools.jobs.store import Store

_RECORDED_TOKENS = 128


class FileWork:
    """`Work` whose one result is a file."""

    total = 1
    in_flight = 1

    def __init__(self, path: Path, what: str) -> None:
        self.path, self._what, self._asked = path, what, False

    @property
    def done(self) -> int:
        """1 if the file is there."""
        return int(self.path.exists())

    def next_requests(self, limit: int) -> list[Request]:
        """Return the one request, once."""
        asked, self._asked = self._asked, True
        return [] if asked or self.done else [self.request()]

    @abstractmethod
    def request(self) -> Request:
        """Return what has the file written."""

    def record(self, response: Response) -> None:
        """Do nothing: the file is there."""

    def progress(self) -> str:
        """Say what is done."""
        return self._what


class Record(FileWork):
    """What every operation gets and gives at a variant, for the beginning of the longest sequence."""

    def __init__(self, store: Store, folder: Path, variant: str) -> None:
        super().__init__(folder / f"record-{variant}.pt", f"operations recorded: {variant}")
        self._store, self._compared = store, Comparison(folder, variant)

    @property
    def done(self) -> int:
        """1 if the file is there, or has been compared already."""
        return super().done or self._compared.done

    def request(self) -> Request:
        """Return the sequence as a response to its first token."""
        store = self._store
        samples = ((key, store.journal.read(store.positions["rollout", None][key])["token_ids"]) for key in store.keys)
        sequences = [store.prompt_ids[int(problem)] + tuple(ids) for (problem, _), ids in samples]
        ids = max(sequences, key=len)[:_RECORDED_TOKENS]
        return Request("record", 0, ids[:1], response_token_ids=ids[1:], record_to=str(self.path))


class Comparison(FileWork):
    """A record of a variant, beside transformers."""

    def __init__(self, folder: Path, variant: str) -> None:
        super().__init__(folder / f"operations-{variant}.json", f"operations compared: {variant}")
        self._record = folder / f"record-{variant}.pt"

    def request(self) -> Request:
        """Name the record and the result."""
        return Request(str(self._record), 0, (), record_to=str(self.path))
