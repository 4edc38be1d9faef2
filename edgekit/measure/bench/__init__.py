"""The benchmark: subjects, trials, machine conditions and measurements."""
