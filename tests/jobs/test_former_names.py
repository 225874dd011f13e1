"""Former names in Python: each raises an error with the new name."""

from __future__ import annotations

import importlib
from functools import partial

import attrs
import pytest

from dataloader import BadRequest, RateLimit, Supplier
from dataloader.flows.etl import Detail, Load, Table


@pytest.mark.parametrize("module", ["dataloader", "dataloader.flows.etl"])
def test_an_import_of_a_former_name_gives_the_new_one(module):
    with pytest.raises(ImportError, match=rf"^{module}\.Budget is now named RateLimit$"):
        exec(f"from {module} import Budget")
    found = importlib.import_module(module)
    assert found.RateLimit is RateLimit
    assert not hasattr(found, "NoSuchName")


def test_an_import_of_target_names_table():
    with pytest.raises(ImportError, match=r"^dataloader\.flows\.etl\.Target is now named Table, such as Table\("):
        exec("from dataloader.flows.etl import Target")


@pytest.mark.parametrize(
    ("make", "former", "new"),
    [(Load, "target", "table"), (Detail, "target", "table"), (Table, "table", "name")],
    ids=["load", "detail", "table"],
)
def test_former_arguments_for_tables_are_refused(make, former, new):
    with pytest.raises(TypeError, match=rf"^{make.__name__}: the argument {former} is now named {new}$"):
        make(**{former: "orders"})


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (partial(Supplier, "hr"), "Supplier"),
        (partial(Load, name="rates"), "Load"),
        (partial(attrs.evolve, Supplier("hr")), "Supplier"),
    ],
    ids=["supplier", "load", "changed supplier"],
)
def test_a_former_argument_is_refused_with_its_new_name(make, kind):
    with pytest.raises(TypeError, match=rf"^{kind}: the argument budgets is now named rate_limits$"):
        make(budgets=(RateLimit(1, 60),))


def test_a_stored_former_field_is_refused_with_its_new_name():
    with pytest.raises(BadRequest, match=r"^budgets: is now named rate_limits$"):
        Supplier.of_spec("hr", {"budgets": [[1, 60]]})
