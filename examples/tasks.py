from dataloader import Tasks, ThreadJob

tasks = Tasks()


@tasks.task("hello.count", queue="default")
def count(job: ThreadJob) -> dict[str, int]:
    for n in range(1, job.args["to"] + 1):
        job.progress({"n": n})  # a canceled job stops here
    return {"counted": job.args["to"]}
