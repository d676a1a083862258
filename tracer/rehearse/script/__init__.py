"""What surrounds the script: its files, loaders, threads, checkpoints, and the programs it starts."""
