"""Held-up deliveries of durable processes: the sink, the time and the error; and their release."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from dataloader.jobs.process_outbox import HeldFilter
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.pages.asking import Question
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

PAGE: Final = 50
REFRESH_S: Final = 5.0
_HERE: Final = "/ui/processes/deliveries"


class WhichDeliveries(Struct, forbid_unknown_fields=True, kw_only=True):
    """Filter of deliveries; `held`: only those that wait for an operator."""

    sink: str | None = None
    type: str | None = None
    id: str | None = None
    held: bool = False

    def wanted(self) -> HeldFilter:
        """Return the store's filter."""
        return HeldFilter(sink=self.sink, type=self.type, process_id=self.id, held=self.held)

    @property
    def given(self) -> dict[str, Any]:
        """Given values by their names in an address."""
        values = {"sink": self.sink, "type": self.type, "id": self.id, "held": "true" if self.held else None}
        return {name: value for name, value in values.items() if value is not None}


class DeliveriesQuery(WhichDeliveries, kw_only=True):
    """Page of deliveries."""

    after: str | None = None


@pages.show("/processes/deliveries", query=DeliveriesQuery)
async def show_deliveries(visit: Visit, query: DeliveriesQuery) -> PageAnswer:
    """Show the processes whose deliveries have failed, by sink."""
    page = await visit.processes.deliveries(query.wanted(), limit=PAGE, after=query.after)
    values = {
        "deliveries": [(one, masked(one)) for one in page.deliveries],
        "next": page.next,
        "query": query,
        "given": query.given,
    }
    return HtmlPage("process_deliveries.html", "Failed deliveries", values, refresh_s=REFRESH_S)


@pages.show("/processes/deliveries/release", role=Role.OPERATE, query=WhichDeliveries)
async def ask_release(_visit: Visit, query: WhichDeliveries) -> PageAnswer:
    """Ask for confirmation of a release, and say what it does."""
    return Question(
        title="Release deliveries?",
        sentences=[
            "The matching deliveries are tried again now, in the order of each process, with a new number of tries.",
            "Deliveries that fail again are retried with growing pauses, and held again after the last try.",
        ],
        told=[f"{name}: {mask_text(str(value))}" for name, value in query.given.items()],
        path=f"{_HERE}/release",
        verb="Release",
        back=PublicAddress().url(_HERE, query.given),
        hidden=query.given,
    ).page


@pages.act("/processes/deliveries/release", role=Role.OPERATE, form=WhichDeliveries)
async def release_deliveries(visit: Visit, form: WhichDeliveries) -> PageAnswer:
    """Retry deliveries."""
    released = await visit.processes.release(form.wanted())
    said = f"Released the deliveries of {released:,} {'process' if released == 1 else 'processes'}."
    return Redirect(PublicAddress().url(_HERE, form.given), said)
