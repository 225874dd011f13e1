"""Report of the soak: the verdict first, then the actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.soak.verdict import Judgement, SoakOutcome


def page(judgements: Sequence[Judgement], outcome: SoakOutcome, blows: Sequence[tuple[float, str]], seed: int) -> str:
    """Return Markdown, with a link to the picture beside it."""
    failed = sum(not judgement.is_good for judgement in judgements)
    done = Counter(how for _, how in blows)
    rows = [
        f"| {judgement.text} | {judgement.found} | {'good' if judgement.is_good else '**bad**'} |"
        for judgement in judgements
    ]
    return "\n".join(
        [
            "# Soak",
            "",
            f"**{f'{failed} of {len(judgements)} are bad' if failed else 'Passed'}.**",
            "",
            f"{outcome.seconds:,.0f} s at {outcome.per_s} jobs a second into three services on one database; two",
            f"of them were killed {done['SIGKILL']} times and told to end {done['SIGTERM']} times (seed {seed}).",
            "",
            "| asked | found | |",
            "| --- | --- | --- |",
            *rows,
            "",
            "Of what must be flat: the mean of the second half, and how far it rises from its beginning to its end.",
            "",
            "![the course](soak.svg)",
            "",
        ]
    )
