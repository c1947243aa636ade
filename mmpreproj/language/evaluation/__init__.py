"""What a language model scores: log-likelihoods, tasks, and how arms compare."""
