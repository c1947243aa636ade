"""Adapters on disk and on the hub: their files, model card, and the way in and out."""
