"""Django beside dataloader: a view writes an order and its job in one transaction, another one shows what came of it.

pip install django 'psycopg[binary]'
export DL_DB_DSN=postgresql://localhost/shop DATABASE_URL=postgresql://localhost/shop
dataloader migrate
dataloader psql -c 'CREATE TABLE orders (number int PRIMARY KEY, job_id uuid NOT NULL)'
python django_shop.py runserver
curl -X POST http://127.0.0.1:8000/orders/7
"""

import json
import os
import sys
from uuid import UUID

import django
from django.conf import settings
from django.core.management import execute_from_command_line
from django.db import connection, models, transaction
from django.http import Http404, HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from psycopg.conninfo import conninfo_to_dict

NAMES = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
address = conninfo_to_dict(os.environ["DATABASE_URL"])
database = {"ENGINE": "django.db.backends.postgresql"} | {name: address.get(key, "") for name, key in NAMES.items()}
settings.configure(DEBUG=True, ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, DATABASES={"default": database})
django.setup()


class Order(models.Model):
    number = models.IntegerField(primary_key=True)
    job_id = models.UUIDField()

    class Meta:
        app_label = "shop"
        db_table = "orders"

    def __str__(self) -> str:
        return f"order {self.number}"


@csrf_exempt  # for curl; a form of your site has its token
@require_POST
def place(request: HttpRequest, number: int) -> JsonResponse:
    with transaction.atomic():  # the order and its job, or neither
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT dl_enqueue('order.bill', %s::jsonb, queue => 'billing', idempotency_key => %s)",
                [json.dumps({"order": number}), f"bill {number}"],
            )
            [job_id] = cursor.fetchone()
        Order.objects.update_or_create(number=number, defaults={"job_id": job_id})
    return JsonResponse({"order": number, "job_id": str(job_id)}, status=201)


def show(_request: HttpRequest, job_id: UUID) -> JsonResponse:
    with connection.cursor() as cursor:
        cursor.execute("SELECT status::text, result, error FROM dl_jobs WHERE job_id = %s", [job_id])
        row = cursor.fetchone()
    if row is None:
        raise Http404
    status, result, error = row
    return JsonResponse({"status": status, "result": json.loads(result or "null"), "error": error})


urlpatterns = [path("orders/<int:number>", place), path("jobs/<uuid:job_id>", show)]

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
