"""List of all pages, and the menu derived from it. Add a new page to the list."""

from __future__ import annotations

from typing import Final

from dataloader.web.pages import (
    audit,
    bulk,
    concealed,
    errors,
    find,
    job_acts,
    job_export,
    job_list,
    job_page,
    key_page,
    loads,
    overview,
    process_acts,
    process_bulk,
    process_deliveries,
    process_list,
    process_page,
    queues,
    run_acts,
    run_comparison,
    runs,
    schedules,
    sign_in,
    stats,
    suppliers,
    tasks,
)
from dataloader.web.pages.menu import menu_of
from dataloader.web.pages.templates_environment import TEMPLATES

PAGES: Final = (
    *sign_in.pages,
    *overview.pages,
    *find.pages,
    *job_list.pages,
    *job_page.pages,
    *job_acts.pages,
    *job_export.pages,
    *key_page.pages,
    *concealed.pages,
    *runs.pages,
    *loads.pages,
    *queues.pages,
    *tasks.pages,
    *suppliers.pages,
    *schedules.pages,
    *process_list.pages,
    *process_page.pages,
    *process_acts.pages,
    *process_bulk.pages,
    *process_deliveries.pages,
    *errors.pages,
    *audit.pages,
    *bulk.pages,
    *run_comparison.pages,
    *run_acts.pages,
    *stats.pages,
)
MENU: Final = menu_of(route.path for route in PAGES if route.method == "GET")
TEMPLATES.globals["menu"] = MENU
