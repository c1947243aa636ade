"""The way of points through a model: settings, modules and walk, hooks, and its life on a model."""
