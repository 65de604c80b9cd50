"""The server's side: cut and merge models, schedule visits, train the global model, compare clients."""
