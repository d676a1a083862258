"""How long communications take: the fabric, the rules of NCCL, and several at once on the same links."""
