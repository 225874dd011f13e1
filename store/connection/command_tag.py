"""Command tag with which the server ends a statement, such as `INSERT 0 3` or `DELETE 5`."""


def row_count(tag: str) -> int:
    """Return the number of rows that the statement has written."""
    return int(tag.rpartition(" ")[2])
