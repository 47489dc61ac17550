"""vLLM: takes prompts, samples groups, scores them, submits them, receives weights in flight."""
