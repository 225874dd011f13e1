"""Declarations of a data engineer: a load, its windows, the settings of its pipeline."""
