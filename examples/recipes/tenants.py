"""Work of many tenants: a tenant's totals by one job at a time, its exports by two, and no tenant keeps others waiting.

dataloader migrate
dataloader psql -c 'CREATE TABLE sale (tenant text, amount numeric)'
dataloader psql -c 'CREATE TABLE total (tenant text PRIMARY KEY, amount numeric)'
dataloader serve --tasks tenants:tasks --workers '[{"queue": "tenants", "concurrency": 8}]'
dataloader trigger tenant.total --args '{"tenant": "ann"}' --url http://127.0.0.1:8080 --wait   # from another terminal
"""

import attrs

from dataloader import Enqueued, Job, Jobs, NewJob, Tasks

tasks = Tasks()


@attrs.frozen
class Tenant:
    tenant: str


@tasks.task("tenant.total", args=Tenant, queue="tenants", lock_key="tenant:{tenant}")
async def total(job: Job[Tenant]) -> None:
    """Compute a tenant's total: one job of this key runs at a time."""
    async with job.transaction() as transaction:
        await transaction.execute(
            "INSERT INTO total SELECT tenant, sum(amount) FROM sale WHERE tenant = $1 GROUP BY tenant"
            " ON CONFLICT (tenant) DO UPDATE SET amount = excluded.amount",
            job.args.tenant,
        )


@tasks.task("tenant.export", args=Tenant, queue="tenants", max_running_per_partition=2)
async def export(job: Job[Tenant]) -> str:
    """Export a tenant's data: at most two jobs of a tenant run, tenants are served round-robin."""
    for part in range(3):
        await job.progress({"part": part + 1, "of": 3})
    return f"{job.args.tenant}.csv"


async def export_all(jobs: Jobs, tenants: list[str], each: int) -> list[Enqueued]:
    """Enqueue jobs with the tenant as `partition_key`."""
    return await jobs.enqueue_many(
        [
            NewJob(task=export.name, args={"tenant": tenant}, partition_key=tenant)
            for tenant in tenants
            for _ in range(each)
        ]
    )
