"""What the coordinator does: cut and merge models, schedule visits, train the global model, compare clients."""
