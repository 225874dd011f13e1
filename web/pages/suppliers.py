"""Suppliers: the use of their rate limits, the request in progress, and operators' actions."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.jobs.supplier_listings import SupplierRecord
from dataloader.web.pages import limit_words
from dataloader.web.pages.addresses import PublicAddress, own_path
from dataloader.web.pages.asking import Question
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect, Undo
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

PAGE: Final = 50
REFRESH_S: Final = 2.0

Name = Annotated[str, Meta(min_length=1)]


class SuppliersQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of suppliers, by name."""

    after: str | None = None


class SupplierQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a supplier."""

    name: Name


class SupplierForm(SupplierQuery, kw_only=True):
    """Supplier, and the page to return to."""

    to: str = "/ui/suppliers"


class SupplierLimitsForm(SupplierQuery, kw_only=True):
    """Texts in the fields of a supplier's limits; `was`: their initial texts."""

    was: str
    rate_limits: str | None = None
    work_periods: str | None = None
    zone: str | None = None
    margin_s: str | None = None


def supplier_page(name: str) -> str:
    """Return the address of a supplier's page."""
    return PublicAddress().url("/ui/supplier", {"name": name})


def _row_of_supplier(record: SupplierRecord) -> dict[str, object]:
    shown = masked(record)
    return {
        "own": record,
        "supplier": shown,
        "rate_limits": [{"limit": one, "share": one.used / one.requests} for one in record.rate_limits],
        "tasks": list(zip(record.tasks, shown.tasks, strict=True)),
    }


@pages.show("/suppliers", query=SuppliersQuery)
async def show_suppliers(visit: Visit, query: SuppliersQuery) -> PageAnswer:
    """Show the suppliers of tasks and loads, by name."""
    page = await visit.limits.suppliers(limit=PAGE, after=query.after)
    values = {"suppliers": list(map(_row_of_supplier, page.suppliers)), "next": page.next}
    return HtmlPage("suppliers.html", "Suppliers", values, refresh_s=REFRESH_S)


@pages.show("/supplier", query=SupplierQuery)
async def show_supplier(visit: Visit, query: SupplierQuery) -> PageAnswer:
    """Show a supplier: its rate limits, its work periods as a week, the request in progress."""
    record = await visit.limits.supplier(query.name)
    shown = masked(record)
    values = _row_of_supplier(record) | {
        "limits": limit_words.limit_rows(limit_words.SUPPLIER_LIMITS, shown.declared, shown.override, shown.limits),
        "week_ranges": limit_words.week_of(record.limits),
        "zone": record.limits.get("zone", "UTC"),
    }
    return HtmlPage("supplier.html", f"Supplier {shown.supplier}", values, refresh_s=REFRESH_S)


@pages.act("/suppliers/pause", role=Role.OPERATE, form=SupplierForm)
async def pause_supplier(visit: Visit, form: SupplierForm) -> PageAnswer:
    """Pause a supplier."""
    await visit.limits.pause_supplier(form.name)
    undo = Undo("/ui/suppliers/resume", {"name": form.name, "to": own_path(form.to)})
    said = f"Paused {mask_text(form.name)}: no jobs of its tasks start."
    return Redirect(own_path(form.to), said, undo)


@pages.act("/suppliers/resume", role=Role.OPERATE, form=SupplierForm)
async def resume_supplier(visit: Visit, form: SupplierForm) -> PageAnswer:
    """End a supplier's pause."""
    await visit.limits.resume_supplier(form.name)
    undo = Undo("/ui/suppliers/pause", {"name": form.name, "to": own_path(form.to)})
    return Redirect(own_path(form.to), f"Resumed {mask_text(form.name)}.", undo)


@pages.show("/suppliers/limits", role=Role.ADMIN, query=SupplierQuery)
async def ask_supplier_limits(visit: Visit, query: SupplierQuery) -> PageAnswer:
    """Show the form for a supplier's limits."""
    record = await visit.limits.supplier(query.name)
    return Question(
        title=f"Limits of {mask_text(record.supplier)}",
        sentences=[
            "Values set here override the declarations of programs, in all processes. They survive deployments.",
            "Empty: as declared by the programs.",
        ],
        path="/ui/suppliers/limits",
        hidden={"name": query.name, "was": limit_words.shown_texts(limit_words.SUPPLIER_LIMITS, record.override)},
        fields=limit_words.limit_fields(limit_words.SUPPLIER_LIMITS, record.override, masked(record).limits),
        verb="Set limits",
        back=supplier_page(query.name),
    ).page


@pages.act("/suppliers/limits", role=Role.ADMIN, form=SupplierLimitsForm)
async def set_supplier_limits(visit: Visit, form: SupplierLimitsForm) -> PageAnswer:
    """Override the limits of a supplier that were changed in the form."""
    await visit.limits.supplier(form.name)  # raises for an unknown supplier, which would be created otherwise
    given = {limit.name: getattr(form, limit.name) for limit in limit_words.SUPPLIER_LIMITS}
    changed = limit_words.changes(limit_words.SUPPLIER_LIMITS, form.was, given)
    if not changed:
        return Redirect(supplier_page(form.name), "The form has no changes.")
    await visit.limits.set_supplier(form.name, changed)
    labels = [limit.label for limit in limit_words.SUPPLIER_LIMITS if limit.name in changed]
    return Redirect(supplier_page(form.name), f"Set: {', '.join(labels)}. Applies from the next claim on.")


@pages.show("/suppliers/remove", role=Role.ADMIN, query=SupplierQuery)
async def ask_supplier_removal(visit: Visit, query: SupplierQuery) -> PageAnswer:
    """Ask for confirmation of a supplier's removal, and say what it does."""
    record = await visit.limits.supplier(query.name)
    return Question(
        title=f"Remove {mask_text(record.supplier)}",
        sentences=[
            "The supplier and its limits are removed until a process declares it again.",
            "It cannot be removed while a task uses it or a load's request is in progress.",
        ],
        path="/ui/suppliers/remove",
        hidden={"name": query.name},
        verb="Remove",
        back=supplier_page(query.name),
        is_harsh=True,
        keep="Keep the supplier",
    ).page


@pages.act("/suppliers/remove", role=Role.ADMIN, form=SupplierQuery)
async def remove_supplier(visit: Visit, form: SupplierQuery) -> PageAnswer:
    """Forget a supplier until a process declares it again."""
    await visit.limits.remove_supplier(form.name)
    return Redirect("/ui/suppliers", f"Removed {mask_text(form.name)}.")
