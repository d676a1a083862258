"""What a recorded run teaches: the job that it was, and how fast its machine is."""
