"""Never run, only type-checked: what a user's program may expect of the public names."""
