"""What a micro-batch does on one rank: operations and communications, block by block."""
