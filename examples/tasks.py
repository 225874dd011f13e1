from dataloader import Job, Tasks

tasks = Tasks()


@tasks.task("hello.count")
async def count(job: Job) -> dict[str, int]:
    """Count to `args.to`, and report the progress."""
    for n in range(1, job.args["to"] + 1):
        await job.progress({"n": n})  # also where a canceled job stops
    return {"counted": job.args["to"]}
