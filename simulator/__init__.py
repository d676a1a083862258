"""Predicts the timeline of a training run: models, workloads, costs, schedules and the engines."""
