"""Live movement of sharded trees between processes: prepared, batched, verified."""
