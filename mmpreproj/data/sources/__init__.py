"""Where captioned pictures come from: folders, data sets, shards, packages, and mixtures of them."""
