"""A long report in a thread, which says how far it is. `reports_web.py` is the web program that shows it.

dataloader serve --tasks reports:tasks
"""

import attrs

from dataloader import Tasks, ThreadJob

tasks = Tasks()


@attrs.frozen
class Report:
    customer: str
    months: int = 12


@tasks.task("report.make", args=Report, queue="reports", unique=True, duplicates="open", timeout_s=3_600)
def make(job: ThreadJob[Report]) -> dict[str, str]:
    lines = [f"Report for {job.args.customer}"]
    for month in range(1, job.args.months + 1):
        lines.append(f"month {month}: {sum(range(month * 1_000))}")  # the long work
        job.progress({"month": month, "of": job.args.months})  # a canceled report stops here
    return {"text": "\n".join(lines)}
