"""What was a crontab: each line a schedule, each script a job whose output is kept and which is stopped properly.

docs/moving/from-cron.md shows the lines. `dataloader serve --tasks from_cron:tasks` takes cron's place.
"""

import subprocess

import attrs
import trio

from dataloader import GiveUp, Job, RetryPolicy, Tasks

tasks = Tasks()
USAGE = 64  # os.EX_USAGE: a script with wrong arguments is not retried


@attrs.frozen
class Script:
    argv: list[str]


@tasks.task("script", args=Script, queue="scripts", max_attempts=3, retry=RetryPolicy(base_s=300), timeout_s=3_600)
async def run_script(job: Job[Script]) -> int | GiveUp:
    """Run the script, and terminate it when the job is stopped by a cancel, its timeout or a shutdown."""
    done = await trio.run_process(
        job.args.argv, capture_stdout=True, stderr=subprocess.STDOUT, check=False, deliver_cancel=terminate
    )
    for line in done.stdout.decode(errors="replace").splitlines():
        job.log.info(line)
    if done.returncode == USAGE:
        return GiveUp(f"{job.args.argv[0]} got wrong arguments")
    if done.returncode:
        raise RuntimeError(f"{job.args.argv[0]} ended with {done.returncode}")
    return done.returncode


async def terminate(process: trio.Process) -> None:
    """Send SIGTERM, and after five seconds SIGKILL."""
    process.terminate()
    with trio.move_on_after(5):
        await process.wait()
        return
    process.kill()


# MAILTO=data@example.org                                     DL_NOTIFY
# CRON_TZ=Europe/Berlin                                       zone
# 30 6 * * 1-5    /usr/local/bin/report --yesterday
# */15 * * * *    flock -n /tmp/poll /usr/local/bin/poll
# 0 3 1 * *       sleep $((RANDOM \% 600)); /usr/local/bin/archive
ZONE = "Europe/Berlin"
tasks.schedule(
    "report", task=run_script, args=Script(["/usr/local/bin/report", "--yesterday"]), cron="30 6 * * MON-FRI", zone=ZONE
)
tasks.schedule("poll", task=run_script, args=Script(["/usr/local/bin/poll"]), cron="*/15 * * * *", overlap="skip")
tasks.schedule(
    "archive", task=run_script, args=Script(["/usr/local/bin/archive"]), cron="0 3 1 * *", zone=ZONE, jitter_s=600
)
