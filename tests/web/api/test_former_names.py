"""Former names of fields and values in requests are refused with the new ones."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(("former", "new"), [("one", "buffer_one"), ("all", "buffer_all"), ("parallel", "allow")])
async def test_a_former_overlap_policy_is_refused_with_its_new_name(open_web, former, new):
    async with open_web() as web:
        body = {"task": "t", "every_s": 60, "overlap": former}
        answer = await web.client.put("/api/v1/schedules/s", json=body)
        errors = [{"path": "overlap", "message": f"the value '{former}' is now named {new}"}]
        assert (answer.status_code, answer.json()["errors"]) == (422, errors)
        answer = await web.client.put("/api/v1/schedules/s", json=body | {"overlap": new})
        assert answer.status_code == 200, answer.text


async def test_budgets_of_a_supplier_are_refused_with_their_new_name(open_web):
    async with open_web() as web:
        answer = await web.client.patch("/api/v1/suppliers/hr", json={"budgets": [[1, 60]]})
        errors = [{"path": "budgets", "message": "is now named rate_limits"}]
        assert (answer.status_code, answer.json()["errors"]) == (422, errors)
        answer = await web.client.patch("/api/v1/suppliers/hr", json={"rate_limits": [[1, 60]]})
        assert (answer.status_code, answer.json()["override"]) == (200, {"rate_limits": [[1, 60]]})
