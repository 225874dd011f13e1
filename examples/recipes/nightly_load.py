"""Sales of yesterday, loaded every night; the person on duty gets a mail if a night fails.

dataloader migrate
dataloader psql -c 'CREATE TABLE sale (day date, shop text, amount numeric, gone boolean, PRIMARY KEY (day, shop))'
export DL_NOTIFY='[{"name":"mail","argv":["python3","nightly_load.py"]}]'
dataloader serve --tasks nightly_load:tasks
"""

import json
import os
import smtplib
import sys
from datetime import date, timedelta
from email.message import EmailMessage
from typing import Any

from dataloader import Tasks
from dataloader.flows.etl import Http, Json, Load, Table, Window, Windows, add_loads

API = os.environ.get("SALES_URL", "https://sales.example.org")
ZONE = "Europe/Berlin"

tasks = Tasks()


def day_of(window: Window) -> dict[str, Any]:
    assert window.start is not None  # a load with windows has both ends
    return {"day": str(window.start.date())}


def no_sales(answer: Any) -> str | None:
    return None if answer else "there are no sales"  # a day without sales fails the run


sales = Load(
    "sales",
    Http(API, endpoint="/sales", params=day_of, format=Json(errors=no_sales)),
    Table("sale", key=("day", "shop"), delete_missing="gone"),
    # The run at half past four ends with yesterday, and loads late corrections of the week before.
    windows=Windows(
        start=date(2026, 11, 1),
        segment="day",
        zone=ZONE,
        column="day",
        delay=timedelta(hours=7),
        look_back=timedelta(days=7),
    ),
    queue="nightly",
    schedule={"cron": "30 4 * * *", "zone": ZONE},
    timeout_s=1_800,
)
add_loads(tasks, sales)


def mail(notice: dict[str, Any], today: date) -> EmailMessage:
    message = EmailMessage()
    message["Subject"] = f"{notice['kind']}: {notice['name']}, {notice['times']} times since the last mail ({today})"
    message["From"], message["To"] = "jobs@example.org", os.environ.get("ON_DUTY", "data@example.org")
    message.set_content(f"{notice['error']}\n\nJobs: {', '.join(notice['job_ids'])}\n")
    return message


if __name__ == "__main__":  # the command of DL_NOTIFY gets the notice on standard input
    with smtplib.SMTP(os.environ.get("SMTP_HOST", "localhost"), int(os.environ.get("SMTP_PORT", "25"))) as server:
        server.send_message(mail(json.load(sys.stdin), date.today()))  # noqa: DTZ011 - a day for people
