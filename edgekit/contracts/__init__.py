"""The contracts between planner, runtime and targets: data, protocols and neutral weights."""
