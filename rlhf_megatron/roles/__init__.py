"""Who: actor, critic, reference. Each takes and returns `DataProto` at the trainer's placement."""
