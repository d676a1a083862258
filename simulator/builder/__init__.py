"""From a job to a program: what each rank does in a step, in which order, and what waits for what."""
