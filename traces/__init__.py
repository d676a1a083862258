"""The timeline that the simulator predicts and the tracer records, and everything one can ask of it."""
