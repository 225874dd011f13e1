"""Which segments a run has, and what each of them consists of."""
