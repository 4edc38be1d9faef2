"""Public tasks with known answers: data sets, prompts, judges and resumable runs."""
