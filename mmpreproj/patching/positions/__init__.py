"""Rotary positions: settings, tables, the processor that turns queries and keys, and their life on a model."""
