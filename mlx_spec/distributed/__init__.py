"""Several machines: a part of the target on each rank, or the drafter on a separate rank."""
