"""What the machine is: devices, links, fabrics, and the catalogue, every figure with its source."""
