"""Public tasks with known answers: data sets, prompts, judges, and runs that can be interrupted."""
