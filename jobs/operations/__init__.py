"""Operations as values: what clients can ask of the system, one file for each feature."""
