"""Text, from where it lies to blocks of tokens."""
