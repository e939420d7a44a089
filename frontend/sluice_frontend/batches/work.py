"""*rim*: what is done on disk with one claimed batch: it is checked, prepared and ended."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice

from sluice_core.words import clean

from ..api.batches import BatchProblem, BatchProblems, Ending, RequestCounts
from .files import FILE, Files, new_id, now_s
from .index import Index
from .item import MAX_DETAIL, Refusal, expired
from .lines import Found, JsonLines, fill
from .outputs import Outputs
from .records import Claim

MAX_LINES = 50_000
MAX_PROBLEMS = 100
"""Problems that are told of one input."""


class Broken(Exception):
    """The batch cannot go on; the problems say why."""

    def __init__(self, problems: list[BatchProblem]) -> None:
        super().__init__(problems)
        self.problems = problems


def broken(code: str, why: object) -> Broken:
    """One problem that is of no line."""
    return Broken([BatchProblem(code, clean(str(why), MAX_DETAIL))])


@contextmanager
def indexed(claim: Claim, files: Files) -> Iterator[tuple[Index, JsonLines]]:
    """All lines of a batch, checked, in an index; raises Broken."""
    batch = claim.record.batch
    source = JsonLines(files.path(batch.input_file_id), batch.endpoint)
    with closing(Index()) as index:
        try:
            problems = [
                BatchProblem(why.code, str(why), line=line)
                for line, why in islice(fill(index, _bounded(source), source.noun), MAX_PROBLEMS)
            ]
        except FileNotFoundError as e:
            raise broken("invalid_input_file", "The input file is not there any more.") from e
        if problems:
            raise Broken(problems)
        if not sum(index.counts()):
            raise broken("empty_file", "The input has no request.")
        yield index, source


def _bounded(source: JsonLines) -> Iterator[Found]:
    for num, found in enumerate(source.found()):
        if num == MAX_LINES:
            raise broken("too_many_tasks", f"The input has more than {MAX_LINES:,} requests.")
        yield found


def check(claim: Claim, files: Files) -> None:
    """Check the whole input, so that lines may be sent; raises Broken."""
    batch = claim.record.batch
    with indexed(claim, files) as (index, source):
        batch.request_counts = RequestCounts(sum(index.counts()))
        batch.model = source.model
    batch.status, batch.in_progress_at = "in_progress", now_s()
    claim.save()


def mark_done(index: Index, outputs: Outputs) -> None:
    """Note what earlier processes have done; raises Broken if that was of another input."""
    try:
        for result in outputs.read():
            if not index.mark(result.custom_id, is_ok=result.is_ok):
                raise broken("invalid_output", "The results so far are of another input.")
    except Refusal as e:
        raise broken("invalid_output", e) from e


def count(claim: Claim, outputs: Outputs) -> None:
    """Tell how far a batch is."""
    batch = claim.record.batch
    counts = RequestCounts(batch.request_counts.total, outputs.num_ok, outputs.num_failed)
    if counts != batch.request_counts:
        batch.request_counts, batch.usage = counts, outputs.usage
        claim.save()


def end(claim: Claim, files: Files, ending: Ending, problems: list[BatchProblem]) -> None:
    """End a batch, and show its results. What a killed process has begun of that is gone on with.

    Raises OSError and `WriteError`: it has not ended then.
    """
    record, batch = claim.record, claim.record.batch
    if record.ending is None:
        with Outputs(claim.output, claim.errors) as outputs:
            _complete(claim, files, outputs, ending)
            outputs.sync()
            batch.usage = outputs.usage
            total = batch.request_counts.total
            batch.request_counts = RequestCounts(total, outputs.num_ok, outputs.num_failed)
        if problems:
            batch.errors = BatchProblems(problems)
        record.ending = ending
        if ending in ("completed", "expired"):
            batch.status, batch.finalizing_at = "finalizing", now_s()
        batch.output_file_id = new_id(FILE) if claim.output.stat().st_size else None
        batch.error_file_id = new_id(FILE) if claim.errors.stat().st_size else None
        claim.save()
    for path, file_id, kind in (
        (claim.output, batch.output_file_id, "output"),
        (claim.errors, batch.error_file_id, "error"),
    ):
        if file_id is not None:
            if path.exists():
                path.replace(files.path(file_id))
            files.publish(
                file_id, f"{batch.id}_{kind}.jsonl", "batch_output", record.owner, record.kept_s
            )
    batch.status = record.ending
    setattr(batch, f"{record.ending}_at", now_s())
    claim.end()


def _complete(claim: Claim, files: Files, outputs: Outputs, ending: Ending) -> None:
    """Count what is there. Lines that were not sent in time get their error."""
    if ending == "expired" and claim.record.batch.status != "validating":
        with suppress(Broken), indexed(claim, files) as (index, _):  # else the input has gone
            mark_done(index, outputs)
            for item in index.pending():
                outputs.append(expired(item.custom_id))
            return
    with suppress(Refusal):  # what cannot be read is shown as it is
        for _ in outputs.read():
            pass
