"""A role that lacks a right: each command names it, and the statement that grants it, in one line."""

from __future__ import annotations

import pytest
from roles import a_role, service_role

SCRIPT = "the owner of the tables should run the script for this role under Roles in docs/security.md\n"


@pytest.mark.slow
def test_a_role_without_create_rights_gets_the_grant_that_it_needs(dataloader, empty_database):
    with a_role(empty_database) as role:
        for command in (("migrate",), ("serve", "--port", "0")):
            result = dataloader(*command, DL_DB_DSN=role.dsn)
            assert result.returncode == 1
            assert "permission denied for schema public" in result.stderr
            assert f"should run: GRANT USAGE, CREATE ON SCHEMA public TO {role.name}" in result.stderr
        grant = result.stderr.partition("should run: ")[2].splitlines()[0].rstrip('"')
        empty_database.psql(grant)
        assert dataloader("migrate", DL_DB_DSN=role.dsn).returncode == 0


@pytest.mark.slow
def test_an_upgrade_without_ownership_names_the_owner_and_suggests_no_grants(dataloader, database):
    database.psql("DELETE FROM dl_function_sets")
    with service_role(database) as role:
        for command in (("migrate",), ("serve", "--port", "0")):
            result = dataloader(*command, DL_DB_DSN=role.dsn)
            assert result.returncode == 1
            assert "an upgrade of the schema was refused (permission denied for schema public)" in result.stderr
            assert f"the tables do not belong to the role {role.name}. Let their owner run" in result.stderr
            assert "GRANT" not in result.stderr


def test_a_role_without_usage_of_the_schema_gets_an_error(dataloader, database):
    with a_role(database, "REVOKE USAGE ON SCHEMA public FROM PUBLIC") as role:
        for command, settings in (("migrate", {}), ("serve", {"DL_MIGRATE": "false", "DL_PORT": "0"})):
            result = dataloader(command, DL_DB_DSN=role.dsn, **settings)
            assert result.returncode == 1
            assert "no schema that exists and that it may use; create one, or GRANT USAGE on it" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [("trigger", "q", "t"), ("jobs",), ("queues",), ("cancel", "{job}"), ("migrate",)])
def test_a_role_without_rights_on_the_tables_is_referred_to_the_grant_script(dataloader, database, add, command):
    job_id = add("q", "t")
    command = [word.format(job=job_id) for word in command]
    with a_role(database) as role:
        result = dataloader(*command, DL_DB_DSN=role.dsn)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.startswith("the role of DL_DB_DSN lacks a right (InsufficientPrivilegeError: permission")
        assert result.stderr.endswith(SCRIPT)
        assert result.stderr.count("\n") == 1
    with service_role(database) as role:
        assert dataloader(*command, DL_DB_DSN=role.dsn).returncode == 0
