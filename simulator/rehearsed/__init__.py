"""Times what a script was rehearsed to do: the same device and network models as every simulation."""
