"""Operations as values: the requests that clients can make, one file per feature."""
