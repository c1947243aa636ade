"""Frozen causal language models with the adapter: text, arms, fitting and measures."""
