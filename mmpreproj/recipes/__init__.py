"""Whole jobs, put together from the packages below: a training run, generation, the quickstart."""
