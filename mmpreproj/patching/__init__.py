"""The adapter: what is added to a model, where, and how it is stored."""
