"""The limits of a run of loads that no user sets: times, rows and bytes that are right for every load."""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen(kw_only=True)
class PipelineLimits:
    """The fixed limits of a run; tests pass smaller ones.

    Attributes:
        retry_s: seconds before the second try of a request, which double with each try, and the most.
        linger_s: seconds for the answer to a cancelled request, after which its connection is closed.
        most_bytes: with this many bytes of responses and rows that wait to be processed or written, no request is sent.
        most_rows: rows of a batch if `batch_size` is less: a response that has more than that is several batches.
        most_refused: rows of a batch that the database refuses one after the other, after which further ones are not
            searched for, nor recorded, one by one.
        most_retried: failures that one segment retries.
        save_s: seconds in which failures are saved that no segment's end has saved.
        clean_up_s: seconds for each statement that ends a run, also after a stop of the job.
        wait_s: the shortest and the longest pause, in seconds, before a run checks again whether another run of its
            load has ended.
        show_s: seconds between two updates of the job's progress.
        log_s: seconds between two lines of progress in the log.
    """

    retry_s: tuple[float, float] = (1.0, 30.0)
    linger_s: float = 2.0
    most_bytes: int = 8 * 2**20
    most_rows: int = 10_000
    most_refused: int = 1_000
    most_retried: int = 1_000
    save_s: float = 5.0
    clean_up_s: float = 5.0
    wait_s: tuple[float, float] = (1.0, 30.0)
    show_s: float = 1.0
    log_s: float = 30.0


LIMITS: Final = PipelineLimits()
