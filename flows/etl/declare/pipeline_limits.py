"""Fixed limits of a run of loads: times, rows and bytes that suit all loads, so that users need not set them."""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen(kw_only=True)
class PipelineLimits:
    """Fixed limits of a run. Tests pass smaller ones.

    Attributes:
        retry_s: seconds before the second try of a request, which double with each try, and their maximum.
        linger_s: seconds for the response to a canceled request, after which its connection is closed.
        most_bytes: no request is sent while this many bytes of responses and rows wait to be processed or written.
        most_rows: maximum rows of a batch if `batch_size` is less. A response with more rows is split into batches.
        piece: maximum rows, bytes and seconds that are collected from a function before they go to the writer.
        most_refused: maximum rows of a batch that are found and recorded one by one when the database refuses them.
        most_retried: maximum failures that one segment retries.
        commit_pauses_s: pauses, in seconds, before a commit whose answer was lost is repeated.
        save_s: seconds to save the failures that no segment's end has saved.
        clean_up_s: seconds for each statement that ends a run, also after a stop of the job.
        wait_s: shortest and longest pause, in seconds, before a run checks again whether another run of its load has
            ended.
        show_s: seconds between two updates of the job's progress.
        log_s: seconds between two lines of progress in the log.
    """

    retry_s: tuple[float, float] = (1.0, 30.0)
    linger_s: float = 2.0
    most_bytes: int = 8 * 2**20
    most_rows: int = 10_000
    piece: tuple[int, int, float] = (5_000, 2**20, 1.0)
    most_refused: int = 1_000
    most_retried: int = 1_000
    commit_pauses_s: tuple[float, ...] = (0.2, 0.4, 0.8, 1.6, 3.2)
    save_s: float = 5.0
    clean_up_s: float = 5.0
    wait_s: tuple[float, float] = (1.0, 30.0)
    show_s: float = 1.0
    log_s: float = 30.0


LIMITS: Final = PipelineLimits()
