"""The command tag with which the server ends a statement, such as `INSERT 0 3` or `DELETE 5`."""


def row_count(tag: str) -> int:
    """How many rows the statement has written."""
    return int(tag.rpartition(" ")[2])
