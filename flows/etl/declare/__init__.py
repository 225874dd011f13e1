"""What a data engineer declares: a load, its windows, its pipeline's settings."""
